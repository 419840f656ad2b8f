"""Running on a cluster: figures that must agree, batch scripts, requeueing. Knows SLURM, and nothing of training."""
