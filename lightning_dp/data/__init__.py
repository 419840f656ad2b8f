"""Who sees which sample, and what it counts."""
