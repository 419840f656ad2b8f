"""How long a verdict holds: for as long as the gradients do that it is of."""

from __future__ import annotations

import pytest

from lightning_dp.progress import Progress
from lightning_dp.reduction.ballot import Reason, Verdict

GOOD, BAD, EMPTY = Verdict(), Verdict(Reason.NONFINITE), Verdict(Reason.EMPTY)

# Reductions in order: the verdict, whose gradients they are, and whose were still there; then what holds.
CASES: dict[str, tuple[list[tuple[Verdict, str, str]], Verdict]] = {
    "the latest": ([(BAD, "d", ""), (GOOD, "d", "")], GOOD),
    "bad ones are added to": ([(BAD, "d", ""), (GOOD, "d", "d")], BAD),
    "bad ones wait for their step": ([(BAD, "d", ""), (GOOD, "g", "d")], BAD),
    "others wait": ([(GOOD, "g", ""), (BAD, "d", "g"), (GOOD, "d", "g")], GOOD),
    "bad ones waited, and were zeroed": ([(BAD, "d", ""), (GOOD, "g", "d"), (GOOD, "d", "g")], GOOD),
    "one of two is still there": ([(BAD, "dg", ""), (GOOD, "d", "g")], BAD),
    "neither is": ([(BAD, "dg", ""), (GOOD, "d", "g"), (GOOD, "g", "d")], GOOD),
    "bad ones come to good ones": ([(GOOD, "d", ""), (BAD, "d", "d")], BAD),
    "nothing comes to good ones": ([(GOOD, "d", ""), (EMPTY, "", "d")], GOOD),
    "nothing comes to bad ones": ([(BAD, "d", ""), (EMPTY, "", "d")], BAD),
    "nothing is all there is": ([(GOOD, "d", ""), (EMPTY, "", "")], EMPTY),
    "after nothing": ([(EMPTY, "", ""), (GOOD, "d", "")], GOOD),
}


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_holds_while_its_gradients_are_there(name: str) -> None:
    reductions, holds = CASES[name]
    progress = Progress(raises=False, max_consecutive_skips=10)
    for verdict, reduced, carried in reductions:
        progress.note(verdict, 3, frozenset(carried), reduced)
    assert progress.verdict == holds
    assert progress.total_count == 3 * len(reductions)
