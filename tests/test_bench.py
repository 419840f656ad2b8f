"""The benchmark: contenders that compute the same step, counters that count, figures that follow from the series."""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rank_pool import RankPool
from test_train_program import run_program
from test_transport_threads import policies
from torch import Tensor, nn

from lightning_dp.bench.clock import StepTimer, sent_bytes
from lightning_dp.bench.contenders import Bucketed, Contender, ReduceAfter, StockDDP, Watched
from lightning_dp.bench.hosts import namespace_hosts
from lightning_dp.bench.launch import Place, cores_of
from lightning_dp.bench.measure import Anatomy, Rounds, Series
from lightning_dp.bench.memory import Footprint, footprint, rehearse
from lightning_dp.bench.results import Quartiles, limit_of, load_results, results_of, save_results, table_of
from lightning_dp.bench.workloads import MLP, Workload
from lightning_dp.config import config_directory
from lightning_dp.errors import ConfigurationError
from lightning_dp.reduction.transport_threads import TransportThreads

CONF = config_directory() / "bench"
WORKLOADS = sorted(path.stem for path in (CONF / "workload").glob("*.yaml"))
SGD = partial(torch.optim.SGD, lr=0.1)
CPU = torch.device("cpu")


def config(*overrides: str) -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("bench", overrides=["output_dir=here", *overrides])


# ---------------------------------------------------------------------------------------------- what is trained


def test_there_is_a_workload_of_every_kind() -> None:
    assert WORKLOADS == ["convnet", "gpt", "many_small", "mlp", "yours"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_has_a_loss_that_reaches_every_parameter(name: str) -> None:
    workload = instantiate(config(f"workload={name}").workload)
    batch = workload.make_batch(seed=0)
    assert workload.count(batch) >= 1
    workload(batch).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.parameters())


def test_the_gpt_has_the_parameters_of_its_formula() -> None:
    workload = instantiate(config("workload=gpt").workload)
    matrices = sum(p.numel() for name, p in workload.blocks.named_parameters() if p.dim() == 2)
    assert matrices == 8 * 12 * 384**2


# ---------------------------------------------------------------------------------------------- contenders

CONTENDERS: dict[str, Any] = {
    "reduce_after": ReduceAfter,
    "stock": StockDDP,
    "stock_views": partial(StockDDP, bucket_cap_mb=0.001, gradient_as_bucket_view=True),
    "stock_in_batches": partial(StockDDP, in_batches=True),
    "bucketed": Bucketed,
    "bucketed_25": partial(Bucketed, bucket_cap_mb=25),
    "bucketed_small": partial(Bucketed, bucket_cap_mb=0.001, first_bucket_cap_mb=0.0005),
}
TINY = {"depth": 3, "width": 8, "batch_size": 4}


def made(make: Any = Contender, seed: int = 0) -> Contender:
    torch.manual_seed(seed)
    return make(MLP(**TINY).double(), SGD)


def steps(contender: Contender, batch: Tensor, count: int) -> list[float]:
    for _ in range(3):
        contender.optimizer.zero_grad()
        contender.backward(contender.loss(batch), count)
        contender.update()
    return nn.utils.parameters_to_vector(contender.workload.parameters()).tolist()


def three_steps(rank: int, name: str) -> list[float]:
    contender = made({**CONTENDERS, "compute_only": Contender}[name])
    return steps(contender, contender.workload.make_batch(seed=rank).double(), 4)  # type: ignore[operator]


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_takes_the_step_of_one_device(name: str, pool: RankPool) -> None:
    alone = made()
    batch = torch.cat([alone.workload.make_batch(seed=rank).double() for rank in range(2)])  # type: ignore[operator]
    right = steps(alone, batch, 8)
    for mine in pool.run(2, three_steps, name):
        assert mine == pytest.approx(right, rel=1e-12, abs=1e-15)


def policies_in_backward(rank: int, in_batches: bool) -> set[int]:
    contender, threads = made(partial(StockDDP, in_batches=in_batches)), TransportThreads()
    seen: set[int] = set()
    next(contender.workload.parameters()).register_hook(lambda _: seen.update(policies(threads)))
    steps(contender, contender.workload.make_batch(seed=rank).double(), 4)  # type: ignore[operator]
    return seen


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has such policies")
def test_stock_leaves_the_transports_threads_alone_unless_it_is_told(pool: RankPool) -> None:
    assert pool.run(2, policies_in_backward, False) == [{os.SCHED_OTHER}] * 2
    assert pool.run(2, policies_in_backward, True) == [{os.SCHED_BATCH}] * 2


def test_without_communication_ranks_part_ways(pool: RankPool) -> None:
    first, second = pool.run(2, three_steps, "compute_only")
    assert first != pytest.approx(second, rel=1e-6)


def collectives_of_a_window(rank: int, name: str) -> tuple[int, int]:
    contender = made(CONTENDERS[name])
    batch = contender.workload.make_batch(seed=rank).double()  # type: ignore[operator]
    group = dist.group.WORLD
    assert group is not None
    timer = StepTimer(contender.workload, CPU, 0, micro_batches=3)
    for _ in range(3):  # torch DDP makes its buckets anew after the first
        timer.step(contender, batch, 4)
    while not contender.settled:
        timer.step(contender, batch, 4)
    issued = []
    for micro_batches in (1, 3):
        timer = StepTimer(contender.workload, CPU, 0, micro_batches)
        before = group._get_sequence_number_for_group()
        timer.step(contender, batch, 4)
        issued.append(group._get_sequence_number_for_group() - before)
    return issued[0], issued[1]


@pytest.mark.parametrize("name", CONTENDERS)
def test_more_micro_batches_send_no_more(name: str, pool: RankPool) -> None:
    for one, three in pool.run(2, collectives_of_a_window, name):
        assert one == three > 0


def bf16_error(rank: int) -> float:
    contender = made(partial(StockDDP, compress=True))
    mine = steps(contender, contender.workload.make_batch(seed=rank).double(), 4)  # type: ignore[operator]
    alone = made()
    right = steps(alone, torch.cat([alone.workload.make_batch(seed=r).double() for r in range(2)]), 8)  # type: ignore[operator]
    return max(abs(a - b) for a, b in zip(mine, right, strict=True))


def test_stock_compression_is_lossy_but_close(pool: RankPool) -> None:
    for error in pool.run(2, bf16_error):
        assert 1e-9 < error < 1e-2


# ---------------------------------------------------------------------------------------------- clocks and counters


class Slow(Workload):
    """A parameter whose gradient is long in coming, and one whose gradient is there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(3))
        self.early = nn.Parameter(torch.ones(3))

    def forward(self, batch: Tensor) -> Tensor:
        return (_Wait.apply(batch * self.late) * self.early).sum()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.2)
        return grad


def test_the_watched_contender_tells_when_gradients_are_ready() -> None:
    contender = Watched(Slow(), SGD)
    contender.backward(contender.loss(torch.ones(3)), 1)
    late, early = contender.ready[0]
    assert 0 < early < 0.2 <= late


class _WaitsAfter(Contender):
    def backward(self, loss: Tensor, count: int) -> None:
        loss.backward()
        time.sleep(0.3)


def test_exposed_time_is_what_comes_after_the_last_gradient() -> None:
    workload = Slow()
    timer = StepTimer(workload, CPU, last=0)
    seconds = timer.step(_WaitsAfter(workload, SGD), torch.ones(3), 1)
    assert 0.3 <= seconds.exposed <= seconds.backward - 0.2
    assert seconds.total >= seconds.forward + seconds.backward + seconds.optimizer - 1e-6


def test_sent_bytes_reads_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                        |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier\n"
        "    lo: 11 1 0 0 0 0 0 0 12 1 0 0 0 0 0 0\n"
        "  eth0:21 2 0 0 0 0 0 0 22 2 0 0 0 0 0 0\n"
    )
    assert (sent_bytes("lo", table), sent_bytes("eth0", table)) == (12, 22)
    assert sent_bytes("eth1", table) is None
    assert sent_bytes("lo", tmp_path / "none") is None


def footprints(rank: int) -> dict[str, tuple[int, int, int]]:
    batch = MLP(4, 1024, 2).make_batch(seed=0)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))  # what the link is measured beside allocates something once
    found = {}
    for name, make in {**CONTENDERS, "compute_only": Contender}.items():
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        rehearse(make(MLP(4, 1024, 2), optimizer), batch, 2)
        workload = MLP(4, 1024, 2)
        _, mine = footprint(lambda make=make, w=workload, o=optimizer: make(w, o), batch, 2, CPU)
        found[name] = (mine.held, mine.peak, mine.messages)
    return found


def outlives_a_rehearsal(make: Any) -> bool:
    """Whether a contender's weights are still there when it has been rehearsed and dropped."""
    workload = MLP(2, 8, 2)
    weight = weakref.ref(next(workload.parameters()))
    rehearse(make(workload, SGD), workload.make_batch(seed=0), 2)
    del workload
    gc.collect()
    return weight() is not None


def contenders_that_outlive_a_rehearsal(rank: int) -> list[str]:
    return [name for name, make in {**CONTENDERS, "compute_only": Contender}.items() if outlives_a_rehearsal(make)]


def test_a_contender_that_is_given_up_leaves_no_weights(pool: RankPool) -> None:
    assert pool.run(2, contenders_that_outlive_a_rehearsal) == [[], []]
    with mock.patch.object(Bucketed, "give_up", Contender.give_up):  # the control: hooks keep them
        assert outlives_a_rehearsal(Bucketed)


def test_footprints(pool: RankPool) -> None:
    gradients = 4 * (1024 * 1024 + 1024) * 4
    for found in pool.run(2, footprints):
        # Objects other than tensors, and what the transport's threads keep, weigh less than half a MiB.
        held = {name: held / gradients for name, (held, _, _) in found.items()}
        assert held["compute_only"] == pytest.approx(1.0, rel=0.05)  # momentum, as large, is not counted
        assert held["stock"] == pytest.approx(2.0, rel=0.05)
        assert held["stock_views"] == pytest.approx(1.0, rel=0.05)
        assert held["bucketed"] == pytest.approx(1.0, rel=0.02)
        assert all(peak >= held for held, peak, _ in found.values())
        messages = {name: count for name, (_, _, count) in found.items()}
        # Torch closes a bucket when it is over the cap, the reducer before it would be; and the ballot.
        assert {name: messages[name] for name in ("compute_only", "reduce_after", "stock", "bucketed_25")} == {
            "compute_only": 0,
            "reduce_after": 1,
            "stock": 2,
            "bucketed_25": 3,
        }
        assert messages["bucketed_small"] > 4


class _LateRank(Contender):
    """Rank 1 begins 0.3 s late, and at the end the ranks wait for each other."""

    def backward(self, loss: Tensor, count: int) -> None:
        time.sleep(0.3 * dist.get_rank())
        loss.backward()
        dist.barrier()


def rounds_with_a_late_rank(rank: int) -> Series:
    rounds = Rounds(MLP(1, 8, 2), partial(torch.optim.SGD, lr=0.1), {"late": _LateRank}, CPU, None, 1)
    series, _ = rounds.run(3)
    return series["late"]


def test_what_a_rank_waits_for_anothers_gradients_is_not_exposed_communication(pool: RankPool) -> None:
    for late in pool.run(2, rounds_with_a_late_rank):
        assert min(late.steps) >= 0.3
        assert statistics.median(late.exposed) < 0.15


# ---------------------------------------------------------------------------------------------- results

ANATOMY = Anatomy(
    forward=1.0,
    backward=2.0,
    optimizer=0.5,
    ready=[2.0, 1.0],
    nbytes=[100, 300],
    transfer=0.8,  # 2 ms a byte
    beside=[(3.5, 3.9, 0.8), (3.5, 3.9, 0.8), (3.5, 9.0, 0.8)],
)


def series(*steps: float, sent: float | None = None) -> Series:
    counted = None if sent is None else [sent] * len(steps)
    return Series(list(steps), [0.1] * len(steps), counted, Footprint(400, 500, 3))


def some_results() -> Any:
    figures = {
        "stock": series(4.0, 2.0, 6.0, sent=404.0),
        "a": series(3.0, 3.0, 3.0),
        "b": series(2.0, 1.9, 9.0),
        "mine": series(2.0, 2.0, 3.0),
    }
    return results_of(figures, ANATOMY, 2, "stock", ["a", "b"], {"world_size": 2}, {"rounds": 3})


def test_the_limit_is_forward_ideal_reduction_and_optimizer() -> None:
    limit = limit_of(ANATOMY, world_size=2)
    # 300 bytes from second 1 on take 0.6, 100 from second 2 on take 0.2: exposed.
    assert limit.ideal == pytest.approx(1.0 + 2.2 + 0.5)
    assert limit.share == pytest.approx(0.5)
    # While the first run travels backward runs at half speed and loses 0.3.
    assert limit.honest == pytest.approx(1.0 + 2.5 + 0.5)
    assert limit.bytes_per_second == pytest.approx(400 / 0.8)
    assert limit_of(replace(ANATOMY, transfer=0.4), 4).bytes_per_second == pytest.approx(600 / 0.4)


def test_ratios_are_paired_by_round_and_refer_to_the_fastest_tuned() -> None:
    results = some_results()
    assert results.tuned == "b"
    by_name = {row.name: row for row in results.rows}
    assert by_name["mine"].ratio == Quartiles(0.5, 0.5, 0.75)  # of 0.5, 1.0 and 0.5
    assert by_name["mine"].ratio_to_tuned.median == 1.0
    assert by_name["stock"].ratio == Quartiles(1, 1, 1)
    assert by_name["stock"].sent_over_formula == pytest.approx(1.01)
    assert by_name["mine"].sent is None


def test_noise_is_how_far_steps_of_one_contender_are_apart() -> None:
    results = some_results()
    # Quartiles of 4, 2, 6 are 3 and 5: half of the median 4. The others: 0, 3.55 of 2, 0.5 of 2.
    assert results.rows[0].step.spread == pytest.approx(0.5)
    assert results.noise == pytest.approx((0.25 + 0.5) / 2)
    assert "differ by 38%" in str(table_of(results).caption)


def test_results_survive_their_file_and_can_be_shown(tmp_path: Path) -> None:
    results = some_results()
    save_results(results, tmp_path)
    assert load_results(tmp_path) == results
    assert table_of(results).row_count == 4 + 2


# ---------------------------------------------------------------------------------------------- where ranks stand


def test_a_place_is_read_from_torchrun_or_srun() -> None:
    torchrun = Place(3, 4, 1, 2).environment("127.0.0.1", 5)
    assert Place.from_environment(torchrun) == Place(3, 4, 1, 2)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
    assert Place.from_environment({**slurm, "SLURM_STEP_ID": "0"}) == Place(3, 4, 1, 2)
    assert Place.from_environment(slurm) is None  # a batch script, not a task of srun
    assert Place.from_environment({}) is None


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (2, [0, 1], [[0], [1]]),
        (2, [2, 3, 6, 7], [[2, 3], [6, 7]]),
        (3, [0, 1, 2, 3], [[0], [1], [2]]),
        (4, [0, 5], [[0], [5], [0], [5]]),
    ],
)
def test_ranks_get_cores_of_their_own(ranks: int, cores: list[int], expected: list[list[int]]) -> None:
    assert [cores_of(rank, ranks, cores) for rank in range(ranks)] == expected


CAN_MAKE_HOSTS = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")


def test_hosts_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigurationError, match="use network=loopback"), namespace_hosts(2, None):
        pass


# ---------------------------------------------------------------------------------------------- the program

FAST = ["workload=mlp", "workload.depth=2", "workload.width=64", "workload.batch_size=2", "rounds=2"]
FEW = [f"~contenders.{name}" for name in ("stock_1", "stock_4", "stock_10", "stock_100", "stock_bf16")]


def run_bench(folder: Path, *overrides: str) -> Any:
    command = [sys.executable, "-m", "lightning_dp.cli.bench", f"hydra.run.dir={folder}", *FAST, *overrides]
    return run_program(command, folder, limit=200)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("network", ["loopback", "hosts"])
def test_the_program_measures_and_writes_what_it_printed(network: str, tmp_path: Path) -> None:
    if network == "hosts" and not CAN_MAKE_HOSTS:
        pytest.skip("hosts need Linux and root")
    folder = tmp_path / "not/there/yet"
    done = run_bench(tmp_path, f"network={network}", f"output_dir={folder}", *FEW)
    assert done.code == 0, done.output
    results = json.loads((folder / "results.json").read_text())
    rows = {row["name"]: row for row in results["rows"]}
    ours = ["bucketed", "bucketed_25", "bucketed_bf16", "bucketed_bf16_exact", "bucketed_unchecked"]
    assert list(rows) == ["compute_only", "reduce_after", "stock", "stock_4_in_batches", "stock_25", *ours]
    assert all(name in done.output for name in rows)
    gradient_bytes = 2 * (64 * 64 + 64) * 4
    assert results["limit"]["gradient_bytes"] == gradient_bytes
    # The interface saw what the formula says, and next to nothing without communication. Headers weigh at this size.
    assert rows["compute_only"]["sent"] < 0.2 * gradient_bytes
    assert 1.0 < rows["stock"]["sent_over_formula"] < 1.25
    assert 1.0 < rows["bucketed"]["sent_over_formula"] < 1.25
    assert rows["bucketed_25"]["messages"] == 2
    assert all(rows[name]["messages"] < 10 for name in ours)  # measuring is over
    assert [name for name in rows if rows[name]["predicted_exposed"] is not None] == [ours[0], *ours[2:]]
    # What measures the link leaves buffers with the transport's threads, once in a process.
    assert rows["bucketed_25"]["held"] < rows["bucketed_25"]["peak"] < 40 * gradient_bytes
    assert OmegaConf.load(folder / "config.yaml").network.hosts == (2 if network == "hosts" else None)


WHO_HOLDS_THE_GROUP = """
import gc
import os
import sys
from unittest import mock

from omegaconf import OmegaConf
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.bench.contenders import Contender
from lightning_dp.bench.launch import Place
from lightning_dp.bench.rank import run_rank

destroy = distributed.destroy_process_group


def tell():
    print(sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects()), "left", flush=True)
    destroy()


class Fails(Contender):
    def __init__(self, *args):
        super().__init__(*args)
        self.steps = 0

    def update(self):
        super().update()
        self.steps += 1
        if self.steps > 1:  # one is the rehearsal's, by another of its kind
            raise RuntimeError("no more steps")


os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")
cfg = OmegaConf.load(sys.argv[1])
if "fails" in sys.argv:
    cfg.contenders.fails = {"_target_": "__main__.Fails", "_partial_": True}
with mock.patch("torch.distributed.destroy_process_group", tell):
    run_rank(cfg, Place(0, 1, 0, 1))
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fails", [False, True])
def test_contenders_are_gone_before_the_process_group(fails: bool, tmp_path: Path) -> None:
    """Torch DDP, if it is the last to hold the group, ends its threads with Python's lock in hand: they may need it.

    An error's traceback would keep them.
    """
    OmegaConf.save(config(*FAST, *FEW), tmp_path / "config.yaml")
    script = tmp_path / "script.py"
    script.write_text(WHO_HOLDS_THE_GROUP)
    command = [sys.executable, script, tmp_path / "config.yaml", *["fails"][: int(fails)]]
    done = run_program(command, tmp_path, limit=100)
    assert "0 left" in done.output.splitlines(), done.output
    assert ("no more steps" in done.output) == fails


@pytest.mark.timeout(240)
def test_a_failing_rank_ends_the_program_with_what_it_said(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "workload._target_=lightning_dp.bench.workloads.Nothing")
    assert done.code == 1
    assert "of the bench ended with code 1" in done.output
    assert "Nothing" in done.output
