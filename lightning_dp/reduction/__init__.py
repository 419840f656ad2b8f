"""Gradients, from hooks to averages. Plain PyTorch: nothing here knows Lightning."""

from lightning_dp.reduction.config import ReducerConfig
from lightning_dp.reduction.outcome import Reduction
from lightning_dp.reduction.reducer import GradientReducer

__all__ = ["GradientReducer", "ReducerConfig", "Reduction"]
