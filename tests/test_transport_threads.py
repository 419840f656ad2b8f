"""Beside compute gloo's threads do not interrupt: which they are, when, and that it makes a difference."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import nn

from lightning_dp.reduction import GradientReducer, ReducerConfig, transport_threads, tuning
from lightning_dp.reduction.transport_threads import TransportThreads
from lightning_dp.reduction.wire import Wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such threads and policies")


def threads_of_now() -> TransportThreads:
    gc.collect()  # what an earlier test in this process left of its group
    return TransportThreads()


def policies(threads: TransportThreads) -> list[int]:
    return [os.sched_getscheduler(thread) for thread in threads.ids]


def names_and_policies(rank: int) -> tuple[list[str], list[list[int]]]:
    threads = threads_of_now()
    seen = [policies(threads)]
    with threads.in_batches():
        seen.append(policies(threads))
    seen.append(policies(threads))
    with pytest.raises(ZeroDivisionError), threads.in_batches():
        _ = 1 / 0
    seen.append(policies(threads))
    return [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads.ids], seen


def test_gloos_threads_are_found_and_changed_for_the_while(pool: RankPool) -> None:
    for names, seen in pool.run(2, names_and_policies):
        # Fails when PyTorch or gloo name their threads otherwise: then see transport_threads.NAMES.
        assert set(names) == {"gloo_tcp_loop", "pt_gloo_runloop"}
        normal, batch = [os.SCHED_OTHER] * len(names), [os.SCHED_BATCH] * len(names)
        assert seen == [normal, batch, normal, normal]


def test_without_a_process_group_there_are_none() -> None:
    assert TransportThreads().ids == ()
    with Wire().beside_compute(torch.device("cpu")):
        pass


def of_own_choice(rank: int) -> tuple[list[int], list[int]]:
    threads = threads_of_now()
    os.sched_setscheduler(threads.ids[0], os.SCHED_BATCH, os.sched_param(0))
    with threads.in_batches() as changed:
        assert changed == list(threads.ids[1:])
        inside = policies(threads)
    after = policies(threads)
    os.sched_setscheduler(threads.ids[0], os.SCHED_OTHER, os.sched_param(0))
    return inside, after


def test_a_policy_that_somebody_has_chosen_is_kept(pool: RankPool) -> None:
    for inside, after in pool.run(1, of_own_choice):
        assert inside == [os.SCHED_BATCH] * len(inside)
        assert after == [os.SCHED_BATCH] + [os.SCHED_OTHER] * (len(inside) - 1)


def test_where_it_is_forbidden_and_for_threads_that_ended_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    deadline = time.monotonic() + 10
    while Path(f"/proc/self/task/{gone.native_id}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel is a little behind
    threads = TransportThreads()
    threads.ids = (gone.native_id or 0, os.getppid())  # and one of another process
    with threads.in_batches() as changed:
        assert changed == []
    assert not threads.can_change

    def forbidden(*_: object) -> None:
        raise PermissionError

    threads.ids = (threading.get_native_id(),)
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with threads.in_batches():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert not threads.can_change
    monkeypatch.delattr(os, "SCHED_BATCH")
    assert TransportThreads().ids == ()


def test_threads_that_end_while_they_are_looked_for_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "comm").write_text("gloo_tcp_loop\n")
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "comm").write_text("python\n")
    monkeypatch.setattr(transport_threads, "TASKS", tmp_path)
    assert TransportThreads().ids == (8,)


def in_a_reducer(rank: int) -> dict[str, list[int]]:
    model, threads = nn.Linear(3, 2), threads_of_now()
    reducer = GradientReducer(model.named_parameters())
    seen = {"before": policies(threads)}
    with reducer.no_sync(), reducer.backward_pass(count=1) as weight:
        (model(torch.ones(1, 3)).sum() * weight).backward()
        seen["no_sync"] = policies(threads)
    with reducer.backward_pass(count=1) as weight:
        (model(torch.ones(1, 3)).sum() * weight).backward()
        seen["backward"] = policies(threads)
    seen["after"] = policies(threads)
    with pytest.raises(ZeroDivisionError), reducer.backward_pass(count=1):
        _ = 1 / 0
    seen["error"] = policies(threads)
    late = GradientReducer(nn.Linear(3, 2).named_parameters(), config=ReducerConfig(overlap=False))
    with late.backward_pass(count=1):
        seen["nothing to send"] = policies(threads)
    return seen


def test_a_reducer_changes_them_while_backward_sends(pool: RankPool) -> None:
    for seen in pool.run(2, in_a_reducer):
        policy = {when: set(policies) for when, policies in seen.items()}
        normal, batch = {os.SCHED_OTHER}, {os.SCHED_BATCH}
        assert policy.pop("backward") == batch
        assert policy == dict.fromkeys(("before", "no_sync", "after", "error", "nothing to send"), normal)


def while_measuring(rank: int, how: str) -> set[int]:
    seen, threads, compute = set(), threads_of_now(), tuning._compute_during

    def watched(works: list[dist.Work | None]) -> None:
        seen.update(policies(threads))
        compute(works)

    tuning._compute_during = watched
    try:
        tuning.measure_link(Wire(), torch.device("cpu"), how)
    finally:
        tuning._compute_during = compute
    return seen


def test_the_link_is_measured_as_it_is_used(pool: RankPool) -> None:
    assert pool.run(2, while_measuring, "in batches") == [{os.SCHED_BATCH}] * 2
    assert pool.run(2, while_measuring, "interrupting") == [{os.SCHED_OTHER}] * 2


def interruptions(rank: int) -> tuple[float, float]:
    """Of the computing thread, on a core that it shares with its transport: as gloo's threads are, and in batches."""
    core = sorted(os.sched_getaffinity(0))[rank]
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task.name), {core})
    threads, pieces, square = TransportThreads(), torch.ones(16, 2**20), torch.ones(256, 256)
    counts: tuple[list[int], list[int]] = ([], [])
    for attempt in range(10):
        dist.barrier()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        with threads.in_batches() if attempt % 2 else nullcontext():
            works = [dist.all_reduce(piece, async_op=True) for piece in pieces]
            while not all(work.is_completed() for work in works):
                torch.mm(square, square)
        counts[attempt % 2].append(resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - before)
    return statistics.median(counts[0]), statistics.median(counts[1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks")
def test_compute_is_interrupted_less_often() -> None:
    seen = []
    for _ in range(3):  # what else runs on these cores interrupts, too
        own = RankPool(2)  # as its ranks stay on one core each
        try:
            seen.append(own.run(2, interruptions))
        finally:
            own.close()
        if all(in_batches < 0.75 * usual for usual, in_batches in seen[-1]):
            return
    raise AssertionError(f"interruptions as usual, and in batches: {seen}")
