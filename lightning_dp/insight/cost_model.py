"""What an all-reduce costs. Pure functions of sizes and times; nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence


def ring_all_reduce_bytes(payload: float, world_size: int) -> float:
    """Bytes that each rank sends to all-reduce ``payload`` bytes over a ring.

    A ring all-reduce is a reduce-scatter followed by an all-gather; in each, a rank sends ``n - 1`` chunks of
    ``payload / n`` bytes, which is the least any all-reduce can send (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", JPDC 2009).

    Args:
        payload: Size of the reduced buffer in bytes.
        world_size: Number of ranks ``n``, at least 1.

    Returns:
        ``2 (n - 1) / n * payload``.

    Raises:
        ValueError: If ``world_size`` is below 1 or ``payload`` is negative.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if payload < 0:
        raise ValueError(f"payload must not be negative, got {payload}")
    return 2 * (world_size - 1) / world_size * payload


def ideal_finish(
    ready: Sequence[float], nbytes: Sequence[float], backward_end: float, seconds_per_byte: float, share: float = 0.0
) -> float:
    """When an ideal reduction would have finished: each gradient leaves when it is ready, at full speed, at no latency.

    The link takes gradients as a fluid, in the order in which they become ready. While it is busy, backward runs at
    ``1 - share`` of its speed, because on a CPU the transport runs on the cores that compute.

    Args:
        ready: When, in seconds after the start of backward, each gradient is ready if nothing is sent.
        nbytes: Size of each gradient in bytes.
        backward_end: When backward ends if nothing is sent.
        seconds_per_byte: Inverse speed of the whole all-reduce, per byte of gradient.
        share: Share of the compute speed that the transport takes while it is busy, 0 to 1.

    Returns:
        Seconds after the start of backward at which backward has ended and all gradients are reduced.

    Raises:
        ValueError: If ``share`` lies outside 0 to 1, or there are not as many sizes as times.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    now, progress, backlog = 0.0, 0.0, 0.0  # backlog: seconds that the link is still busy

    def compute(until: float) -> None:
        nonlocal now, progress, backlog
        work = max(0.0, until - progress)
        while_busy = min(work, backlog * (1 - share))
        busy = while_busy / (1 - share) if share < 1 else backlog * (work > 0)
        now += busy + work - while_busy
        backlog -= busy
        progress += work

    for time, size in sorted(zip(ready, nbytes, strict=True)):
        compute(time)
        backlog += size * seconds_per_byte
    compute(backward_end)
    return now + backlog


def transport_share(alone: float, under_transfer: float, transfer: float, transfer_end: float) -> float:
    """Share of the compute speed that a busy transport takes.

    Args:
        alone: Seconds of some computation without transfers.
        under_transfer: Seconds of the same while a transfer, started with it, runs.
        transfer: Seconds of that transfer without the computation.
        transfer_end: Seconds after which the transfer beside the computation was complete.

    Returns:
        0 (none) to 1 (no computation while the link is busy).
    """
    moved = min(1.0, under_transfer / transfer_end) if transfer_end > 0 else 1.0  # while the computation ran
    busy = transfer * moved
    return min(1.0, max(0.0, (under_transfer - alone) / busy)) if busy > 0 else 0.0
