"""Is the run what it should be: equal replicas, different data. Plain PyTorch: nothing here knows Lightning."""
