"""Who is missing, when a collective has failed: those who still wait sign in at the store that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

GRACE = 3.0  # seconds that ranks which wait for the same thing may give up apart from each other


def missing_ranks(rank: int, ranks: Sequence[int], grace: float = GRACE) -> tuple[int, ...]:
    """Signs in and waits until all others have, or the time is over.

    Only for a run that is about to end: who has signed in once stays so.

    Args:
        rank: This process's rank in the default group.
        ranks: All ranks that take part in what failed, as ranks of the default group.
        grace: Seconds to wait for them.

    Returns:
        Ranks that have not signed in; empty if all have, or the store cannot be reached.
    """
    try:
        store = PrefixStore("lightning_dp/roll_call", _get_default_store())
        store.set(str(rank), "here")
        deadline = time.monotonic() + grace
        while missing := tuple(other for other in ranks if not store.check([str(other)])):
            if time.monotonic() > deadline:
                return missing
            time.sleep(0.05)
    except (RuntimeError, ValueError):
        pass  # whoever keeps the store is gone
    return ()
