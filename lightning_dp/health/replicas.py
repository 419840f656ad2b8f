"""The replica check: do all ranks hold the same bits, and if not, which rank is the odd one.

A check sends one number per rank. Only if these differ does it send more, to find out what differs, and where.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.errors import ConfigurationError, ReplicaMismatchError
from lightning_dp.health.fingerprint import combine, fingerprints, home, majority
from lightning_dp.reduction.replication import broadcast_from
from lightning_dp.reduction.wire import Wire

ACTIONS = ("warn", "raise", "resync")
MAX_NAMED = 5
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

NamedState = Callable[[], Iterable[tuple[str, Any]]]


@dataclass(frozen=True)
class Difference:
    """One tensor or value that is not the same on all ranks.

    Attributes:
        name: Its name.
        fingerprints: Its fingerprint on each rank; ``None`` where a rank does not have it.
        copyable: Whether it is a tensor of the same shape and dtype on all ranks.
    """

    name: str
    fingerprints: tuple[int | None, ...]
    copyable: bool

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """Ranks that differ from what more than half of the ranks agree on; empty if there is no such majority."""
        return majority(self.fingerprints)[1]

    @property
    def source(self) -> int:
        """The first rank of the majority, from which the odd ones can be put right."""
        return next(rank for rank in range(len(self.fingerprints)) if rank not in self.odd_ranks)

    def describe(self) -> str:
        """The name, and which ranks do not have it."""
        missing = [rank for rank, value in enumerate(self.fingerprints) if value is None]
        return f"{self.name} (missing on {_ranks(missing)})" if missing else self.name


@dataclass(frozen=True)
class ReplicaReport:
    """What a check found; the same on every rank.

    Attributes:
        world_size: Number of ranks.
        compared: How many tensors and values this rank compared.
        differences: Those that differ, in their order.
        resynced: Whether they were put right.
    """

    world_size: int
    compared: int
    differences: tuple[Difference, ...] = ()
    resynced: bool = False

    @property
    def agree(self) -> bool:
        """Whether all ranks held the same bits."""
        return not self.differences

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """The ranks that differ from a majority in some tensor."""
        return tuple(sorted({rank for difference in self.differences for rank in difference.odd_ranks}))

    @property
    def undecided(self) -> tuple[Difference, ...]:
        """The differences in which no value is held by more than half of the ranks."""
        return tuple(difference for difference in self.differences if not difference.odd_ranks)

    def describe(self) -> str:
        """What differs and on which rank, in one line."""
        if self.agree:
            return f"all {self.world_size} ranks hold the same"
        named = ", ".join(difference.describe() for difference in self.differences[:MAX_NAMED])
        more = len(self.differences) - MAX_NAMED
        if not self.odd_ranks:
            who = f"the {self.world_size} ranks' replicas differ (no majority tells which is right)"
        else:
            who = (
                f"{_ranks(self.odd_ranks)} of {self.world_size} differ{'s' * (len(self.odd_ranks) == 1)} from the rest"
            )
        undecided = f"; no majority in {len(self.undecided)} of them" if self.odd_ranks and self.undecided else ""
        return f"{who} in {named}{f' and {more} more' if more > 0 else ''}{undecided}"


class ReplicaCheck:
    """Compares what the ranks hold, bit by bit, by fingerprints.

    Args:
        wire: The ranks.
        state: Gives the names and values to compare, as :func:`named_state` does; called anew for each check, so that
            tensors replaced by assignment are followed. Numbers and strings are compared, too, also inside
            dictionaries, lists and tuples; other objects are passed over. The same order on every rank is cheapest.
        action: What follows from a difference: ``"warn"`` (rank 0 does), ``"raise"`` on every rank, or ``"resync"``:
            warn, and overwrite the odd ranks' tensors with the majority's. With two ranks there is no majority, so that
            nothing can be put right, and the error is raised.
        device: Where messages lie; by default where the tensors are. Needed if some rank may have no tensor on it.

    Raises:
        ConfigurationError: If the action is not known.
    """

    def __init__(self, wire: Wire, state: NamedState, action: str = "warn", device: torch.device | None = None) -> None:
        if action not in ACTIONS:
            raise ConfigurationError(f"action={action!r} is not known: use one of {', '.join(ACTIONS)}")
        self._wire = wire
        self._state = state
        self._action = action
        self._device = device

    def check(self, where: str = "") -> ReplicaReport:
        """Compares all ranks; they must all call it at the same point. On a GPU the host waits once.

        Args:
            where: For the message, such as ``"step 100"``.

        Raises:
            ReplicaMismatchError: If they differ, and the action is ``"raise"``, or ``"resync"`` is not possible.
            CommunicationError: If a rank stopped, or did not arrive within the group's timeout.
        """
        snapshot = _Snapshot(self._state(), self._device)
        world_size, compared = self._wire.world_size, len(snapshot.names)
        if self._agree(snapshot):
            return ReplicaReport(world_size, compared)
        report = ReplicaReport(world_size, compared, self._differences(snapshot))
        if report.agree:  # the same things in another order
            return report
        message = f"{where}{': ' * bool(where)}{report.describe()}"
        if self._action == "raise":
            raise ReplicaMismatchError(f"{message}; go on from a checkpoint written before, or use action='resync'")
        if self._action == "resync":
            self._resync(snapshot, report, message)
            report = replace(report, resynced=True)
            message += "; the majority's values were copied"
        if self._wire.rank == 0:
            warnings.warn(message, stacklevel=2)
        return report

    def _agree(self, snapshot: _Snapshot) -> bool:
        totals = torch.zeros(self._wire.world_size, dtype=torch.int64, device=snapshot.prints.device)
        totals[self._wire.rank] = snapshot.total()
        self._wire.wait(self._wire.all_reduce(totals), "the exchange of the replicas' fingerprints")
        return self._wire.world_size == 1 or len(set(totals.tolist())) == 1

    def _differences(self, snapshot: _Snapshot) -> tuple[Difference, ...]:
        """What differs, from what all ranks say: so every rank comes to the same."""
        prints = self._wire.gather(snapshot.prints.tolist())
        kinds = self._wire.gather(snapshot.kinds())
        by_rank = [dict(zip(names, values, strict=True)) for names, values in zip(kinds, prints, strict=True)]
        differences = []
        for name in dict.fromkeys(name for names in kinds for name in names):
            values = tuple(held.get(name) for held in by_rank)
            if len(set(values)) > 1:
                same_kind = len({theirs.get(name) for theirs in kinds}) == 1
                differences.append(Difference(name, values, same_kind and name in snapshot.tensors))
        return tuple(differences)

    def _resync(self, snapshot: _Snapshot, report: ReplicaReport, message: str) -> None:
        if report.undecided:
            raise ReplicaMismatchError(
                f"{message}; without a majority it is not known which rank to copy from, go on from a checkpoint"
            )
        for difference in report.differences:
            if not difference.copyable:
                raise ReplicaMismatchError(f"{message}; {difference.name} cannot be copied, go on from a checkpoint")
        for difference in report.differences:
            tensor = snapshot.tensors[difference.name].detach()
            # A group of GPUs does not send what lies on the CPU, as Adam's step counts do.
            sent = tensor.to(snapshot.prints.device)
            broadcast_from(difference.source, [sent], self._wire)
            if sent.device != tensor.device:
                tensor.copy_(sent)
        if not self._agree(_Snapshot(self._state(), self._device)):
            raise ReplicaMismatchError(f"{message}; they still differ after the majority's values were copied")


class _Snapshot:
    """Names and fingerprints of what a rank holds at one time: tensors first, then other values."""

    def __init__(self, state: Iterable[tuple[str, Any]], device: torch.device | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        for name, leaf in (leaf for named in state for leaf in _leaves(*named)):
            if name in self.tensors or name in self.values:
                raise ConfigurationError(f"two of the values to compare have the name {name!r}; give each its own")
            (self.tensors if isinstance(leaf, Tensor) else self.values)[name] = leaf
        tensors = list(self.tensors.values())
        device = device or home(tensors)
        others = torch.tensor([_digest(repr(value)) for value in self.values.values()], dtype=torch.int64)
        self.prints = torch.cat([fingerprints(tensors, device), others.to(device, non_blocking=True)])

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self.values]

    def total(self) -> Tensor:
        """One number for all of it, the names included."""
        return combine(self.prints) + _digest("\n".join(self.names))

    def kinds(self) -> dict[str, str]:
        """What each thing is, by name: dtype and shape, or a type."""
        tensors = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in self.tensors.items()}
        return tensors | {name: type(value).__name__ for name, value in self.values.items()}


def named_state(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    compares_buffer: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Any]]:
    """What replicas have in common: parameters, buffers, and all that optimizers hold.

    Args:
        module: The replicated module.
        optimizers: Their state and settings (learning rates, ...).
        compares_buffer: Whether the buffer of this name should be the same on all ranks; statistics of BatchNorm are
            each rank's own unless something makes them equal.

    Yields:
        Names and values. A name is ``parameter a.weight``, ``buffer b.running_mean`` or, with the optimizer's number,
        ``optimizer 0: exp_avg of a.weight``.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in module.named_buffers():
        if compares_buffer(name):
            yield f"buffer {name}", buffer
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                owner = names.get(id(parameter), f"parameter {place} of group {group_number}")
                if parameter in optimizer.state:
                    for key, value in optimizer.state[parameter].items():
                        yield f"optimizer {number}: {key} of {owner}", value
            for key, value in group.items():
                if key != "params":
                    yield f"optimizer {number}: {key} of group {group_number}", value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) and value.layout in _SPARSE_PARTS:
        for part in _SPARSE_PARTS[value.layout]:
            yield f"{name}.{part.strip('_')}", getattr(value, part)()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _leaves(f"{name}[{place}]", inner)
    elif value is None or isinstance(value, (Tensor, Number, str, bytes)):
        yield name, value
    # Else an object, which may well be another one on each rank.


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
