"""What an all-reduce costs. Pure functions of sizes; nothing here communicates."""


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
