"""Several loaders that deliver one batch between them, taken as one loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


class JointLoader:
    """Loaders that are iterated together, so that ranks are kept in step by their common batch.

    Kept in step one by one, a loader that ends early on one rank would have to lend a batch to the others' real ones.

    Args:
        parts: The loaders, as they are dealt out to this rank.
        combine: Starts an iteration over combined batches; calls ``iter`` on each part.
        length: Number of combined batches from the lengths of the parts; ``None`` stands for a part without one, and
            as the result for no length.
    """

    def __init__(
        self,
        parts: Sequence[Iterable[Any]],
        combine: Callable[[], Iterator[Any]],
        length: Callable[[list[int | None]], int | None],
    ) -> None:
        self.parts: list[Any] = list(parts)
        self._combine = combine
        self._length = length
        self._begun: list[Any] = []

    batch_sampler = None  # where there is a sampler, this is asked for, too

    @property
    def sampler(self) -> JointLoader:
        """What is told of a new epoch, as a loader's sampler is."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Tells the samplers of all parts, and parts that want to know themselves, which epoch begins."""
        for part in self.parts:
            batch_sampler = getattr(part, "batch_sampler", None)
            told = (part, getattr(part, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
            for owner in {id(owner): owner for owner in told}.values():
                if callable(getattr(owner, "set_epoch", None)):
                    owner.set_epoch(epoch)  # type: ignore[union-attr]

    def __len__(self) -> int:
        """Combined batches of this rank."""
        length = self._length([length_of(part) for part in self.parts])
        if length is None:
            raise TypeError("a combination of loaders has no length where one that decides it has none")
        return length

    def __iter__(self) -> Iterator[Any]:
        """Combined batches; nothing is loaded before the first is asked for."""
        self._begun = self._part_states()
        yield from self._combine()

    def state_dict(self) -> dict[str, list[Any]] | None:
        """States that the parts had when the iteration began, and now; ``None`` if no part has any."""
        return {"begun": self._begun, "now": self._part_states()} if any(map(has_state, self.parts)) else None

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Takes the parts back to where the iteration began.

        From there batches are to be drawn again, as a part that is cycled through has been begun more than once.
        """
        self._load(state["begun"])

    def go_on(self, state: dict[str, list[Any]]) -> None:
        """Takes the parts to where they stood, for an iteration that begins there."""
        self._load(state["now"])
        for part in self.parts:
            if has_state(part):
                iter(part)  # one that resumes when it is iterated does not in the iteration after that

    def _part_states(self) -> list[Any]:
        return [part.state_dict() if has_state(part) else None for part in self.parts]

    def _load(self, states: list[Any]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            if state is not None:
                part.load_state_dict(state)


def length_of(loader: Iterable[Any]) -> int | None:
    """The loader's length, ``None`` if it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_state(loader: object) -> bool:
    """Whether the loader can save where it is, and go on there."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
