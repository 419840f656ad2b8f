"""Ways to take a training step, measured side by side on the same ranks."""
