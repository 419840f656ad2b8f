"""What data parallelism costs and where the time goes."""
