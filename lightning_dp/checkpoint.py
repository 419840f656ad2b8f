"""What a checkpoint holds of a run beside Lightning's own, and how the run that goes on takes it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_dp.loaders import TrainerLoaders
from lightning_dp.progress import Progress
from lightning_dp.reduction.reducer import GradientReducer
from lightning_dp.watch import Watch

KEY = "lightning_dp"
VERSION = 1


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that have a state; but for the counters, there are none where nothing is fitted.

    Attributes:
        progress: Its counters.
        reducer: What averages gradients.
        loaders: Where it stands in the data.
        watch: What is looked after beside the gradients.
    """

    progress: Progress
    reducer: GradientReducer | None
    loaders: TrainerLoaders | None
    watch: Watch | None

    def save(
        self,
        checkpoint: dict[str, Any],
        learnt: Mapping[str, Any],
        metrics: Mapping[str, Tensor],
        alone: bool,
    ) -> None:
        """Adds to a checkpoint what a resumed run needs, the same on every rank; all ranks together.

        Args:
            checkpoint: Lightning's checkpoint.
            learnt: State of the reducer, or of the last one that there was.
            metrics: What was logged so far, by name.
            alone: The other ranks do not take part; then what only all of them know is left out.

        Raises:
            ReplicaMismatchError: If ranks are no replicas, by policy.
        """
        reducer, loaders, watch = self.reducer, self.loaders, self.watch
        if watch is not None and not alone:
            watch.check_replicas(self.progress.attempted)
        checkpoint[KEY] = {
            "version": VERSION,
            "progress": self.progress.state_dict(),
            "reducer": dict(learnt),
            "loaders": loaders.state(alone) if loaders is not None else [],
            "watch": watch.state_dict() if watch is not None else None,
            "metrics": dict(metrics),
            "window": reducer.window_state() if reducer is not None and not alone else None,
        }

    def load(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
        """Takes over what :meth:`save` has added, while fitting; all ranks together.

        Returns:
            What had been logged; ``None`` if the checkpoint does not say, or there is nothing to take over.
        """
        state = checkpoint.get(KEY)
        if state is None or self.reducer is None:
            return None
        self.progress.load_state_dict(state["progress"])
        self.reducer.load_state_dict(state["reducer"])
        if self.watch is not None and state.get("watch") is not None:
            self.watch.load_state_dict(state["watch"])
        if state.get("window") is not None:
            self.reducer.resume_window(state["window"])
        if self.loaders is not None:
            self.loaders.restore(state["loaders"])
        metrics: Mapping[str, Tensor] | None = state.get("metrics")
        return metrics
