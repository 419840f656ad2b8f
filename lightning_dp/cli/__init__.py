"""Commands: short Hydra programs over ``conf/``."""
