"""The training program, run as a user runs it: processes of their own in an empty folder."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from lightning_dp.demo.convnet import DigitsNet
from lightning_dp.demo.digits import TRAIN

KIB = 1024
GRACE = 10  # seconds that a program gets to end by itself once it is told to
GRADIENT_KIB = sum(p.numel() * p.element_size() for p in DigitsNet().parameters()) / KIB
COMMUNICATION = ["optimizer steps", "skipped steps", "samples seen", "world size", "sent per step"]
COMMUNICATION += ["messages per step", "exposed communication"]
# What tests in this process, or the launcher of the tests, may have set and a fresh program must not find.
INHERITED = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
INHERITED += ("MASTER_PORT", "PL_GLOBAL_SEED", "TORCHELASTIC_RUN_ID", "HYDRA_FULL_ERROR", "PYTHONPATH")


@dataclass(frozen=True)
class Finished:
    """A program that has ended: its exit code, what all its processes wrote, and seconds."""

    code: int
    output: str
    seconds: float

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each row of the tables in the output."""
        lines = [line.strip("│").split("│") for line in self.output.splitlines() if line.startswith("│")]
        return [(name.strip(), value.strip()) for name, value in lines]

    def table(self) -> dict[str, str]:
        """The rows; each stands there once, however many ranks there are."""
        assert self.code == 0, self.output
        names = [name for name, _ in self.rows()]
        assert len(names) == len(set(names)), names
        return dict(self.rows())


def run_program(command: Sequence[str | Path], folder: Path, limit: float) -> Finished:
    """Runs ``command`` in ``folder``; ends it and the processes that it started if it takes longer than ``limit``."""
    environment = {name: value for name, value in os.environ.items() if name not in INHERITED}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException as error:
        # Politely at first: torchrun's ranks are in sessions of their own, and only torchrun can end them.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=GRACE)
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"not finished within {limit} s; so far:\n{output}")
        raise
    return Finished(process.returncode, output, time.monotonic() - start)


def train(folder: Path, *overrides: str, limit: float = 100) -> Finished:
    return run_program([sys.executable, "-m", "lightning_dp.cli.train", *overrides], folder, limit)


def sent_per_step(value: str) -> tuple[float, float]:
    """KiB that a rank sends per step, and the ring formula's KiB."""
    found = re.fullmatch(r"([\d.,]+) KiB a rank \(ring formula ([\d.,]+), [\d.]+ x\)", value)
    assert found, value
    sent, formula = (float(number.replace(",", "")) for number in found.groups())
    return sent, formula


# ---------------------------------------------------------------------------------------------- the default run


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """The run without any override, and the folder that it was run in."""
    folder = tmp_path_factory.mktemp("default")
    return train(folder), folder


def run_folder_of(folder: Path) -> Path:
    """The one folder below ``runs``, by date and by time."""
    [run] = folder.glob("runs/*/*")
    return run


def test_the_default_run_reaches_97_percent_in_less_than_a_minute(default_run: tuple[Finished, Path]) -> None:
    finished, _ = default_run
    accuracy = float(finished.table()["test/accuracy"])
    print(f"default run: accuracy {accuracy}, {finished.seconds:.0f} s")
    assert accuracy >= 0.97
    assert finished.seconds < 60


def test_the_table_has_each_row_once_and_its_figures_are_right(default_run: tuple[Finished, Path]) -> None:
    table = default_run[0].table()
    assert list(table) == ["test/accuracy", *COMMUNICATION]
    # 1,296 images are 648 for each of two ranks: 40 batches of 16 and one of 8; 15 epochs.
    assert table["optimizer steps"] == "615"
    assert table["skipped steps"] == "0"
    assert table["samples seen"] == f"{15 * TRAIN:,}"
    assert table["world size"] == "2"
    # How many buckets there are is measured.
    messages = re.fullmatch(r"(\d+) \(buckets (\d+), and the ballot\)", table["messages per step"])
    assert messages
    assert int(messages[1]) == int(messages[2]) + 1
    sent, formula = sent_per_step(table["sent per step"])
    assert formula == pytest.approx(2 * (2 - 1) / 2 * GRADIENT_KIB, abs=0.1)
    # The ballot comes on top; it is to be small.
    assert formula <= sent <= 1.001 * formula
    figures = r"([\d.]+) ms a step \(backward ([\d.]+) ms, predicted [\d.]+ ms\)"
    exposed = re.fullmatch(figures, table["exposed communication"])
    assert exposed
    assert float(exposed[2]) > 0


def test_everything_is_written_into_one_run_folder(default_run: tuple[Finished, Path]) -> None:
    finished, folder = default_run
    run = run_folder_of(folder)
    assert [path for path in folder.rglob("*") if path.is_file() and run not in path.parents] == []
    assert f"logs, checkpoints and config.yaml: {run}" in finished.output
    assert {"config.yaml", "hydra.yaml", "overrides.yaml"} <= {path.name for path in (run / ".hydra").iterdir()}
    assert list(run.glob("tensorboard/version_0/events.out.tfevents.*"))
    assert {path.name for path in run.iterdir() if path.is_dir()} == {".hydra", "checkpoints", "csv", "tensorboard"}
    assert [path.name for path in (run / "csv").iterdir()] == ["version_0"]


def test_the_csv_log_has_a_validation_accuracy_per_epoch(default_run: tuple[Finished, Path]) -> None:
    header, *lines = (run_folder_of(default_run[1]) / "csv/version_0/metrics.csv").read_text().splitlines()
    columns = header.split(",")
    rows = [dict(zip(columns, line.split(","), strict=True)) for line in lines]
    validated = [(int(row["epoch"]), float(row["val/accuracy"])) for row in rows if row["val/accuracy"]]
    assert [epoch for epoch, _ in validated] == list(range(15))
    assert all(0 <= accuracy <= 1 for _, accuracy in validated)


def test_the_configuration_is_saved_with_every_reference_resolved(default_run: tuple[Finished, Path]) -> None:
    run = run_folder_of(default_run[1])
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["output_dir"] == str(run)
    assert saved["callbacks"]["best_checkpoint"]["dirpath"] == f"{run}/checkpoints"
    assert saved["strategy"]["_target_"] == "lightning_dp.BucketedDDPStrategy"
    assert "${" not in (run / "config.yaml").read_text()


def test_the_last_checkpoint_is_that_of_the_last_step(default_run: tuple[Finished, Path]) -> None:
    last = run_folder_of(default_run[1]) / "checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 615


def test_training_goes_on_from_a_checkpoint(default_run: tuple[Finished, Path], tmp_path: Path) -> None:
    last = run_folder_of(default_run[1]) / "checkpoints/last.ckpt"
    # With another number of ranks, as a whole number of epochs is done.
    table = train(tmp_path, f"ckpt_path={last}", "trainer.max_epochs=16", "trainer.devices=1", "test=false").table()
    # The figures are those of the whole run: 15 epochs on two ranks, and 81 batches on one.
    assert table["optimizer steps"] == "696"
    assert table["samples seen"] == f"{16 * TRAIN:,}"
    assert table["test/accuracy"] == "was not logged"


# ---------------------------------------------------------------------------------------------- other runs


def test_settings_are_overridden_on_the_command_line(tmp_path: Path) -> None:
    overrides = ["strategy.bucket_cap_mb=1", "trainer.devices=4", "output_dir=not/there/yet"]
    overrides += ["trainer.accumulate_grad_batches=2", "trainer.max_epochs=1"]
    table = train(tmp_path, *overrides).table()
    assert list(table) == ["test/accuracy", *COMMUNICATION]
    # 324 images a rank are 21 batches: ten windows of two and a last one of one.
    assert table["optimizer steps"] == "11"
    assert table["samples seen"] == f"{TRAIN:,}"
    assert table["world size"] == "4"
    sent, formula = sent_per_step(table["sent per step"])
    assert formula == pytest.approx(2 * (4 - 1) / 4 * GRADIENT_KIB, abs=0.1)
    # Sent once per window, not once per batch.
    assert formula <= sent <= 1.001 * formula
    saved = yaml.safe_load((tmp_path / "not/there/yet/config.yaml").read_text())
    assert saved["strategy"]["bucket_cap_mb"] == 1


MINE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, width, seed=None):  # none of the default model's arguments
        super().__init__()
        self.linear = torch.nn.Linear(width, 1)
    def training_step(self, batch, batch_idx):
        self.log("mine/width", float(self.linear.in_features))
        return self.linear(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(10, 3)), batch_size=2)
"""


def test_a_users_own_classes_are_found_in_the_folder_where_the_program_is_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    overrides = ["model._target_=mine.Net", "+model.width=3", "data._target_=mine.Data", "metric=mine/width"]
    overrides += ["trainer.max_epochs=1", "trainer.devices=1", "test=false", "callbacks=none", "logger=none"]
    table = train(tmp_path, *overrides).table()
    assert list(table) == ["mine/width", *COMMUNICATION]
    assert table["mine/width"] == "3.0000"
    assert (table["optimizer steps"], table["samples seen"], table["world size"]) == ("5", "10", "1")
    assert not list(tmp_path.rglob("csv"))


def test_lightnings_own_strategy_can_be_chosen_for_comparison(tmp_path: Path) -> None:
    limits = [f"+trainer.limit_{loop}_batches=2" for loop in ("train", "val", "test")]
    table = train(tmp_path, "strategy=ddp", "trainer.max_epochs=1", "trainer.devices=1", *limits).table()
    assert list(table) == ["test/accuracy", "optimizer steps", "world size"]
    assert (table["optimizer steps"], table["world size"]) == ("2", "1")


def test_a_rank_that_fails_ends_the_program_with_its_error(tmp_path: Path) -> None:
    failing = "        if self.global_rank == 1: raise RuntimeError('rank 1 has had enough')\n"
    start = "    def training_step(self, batch, batch_idx):\n"
    (tmp_path / "mine.py").write_text(MINE.replace(start, start + failing))
    overrides = ["model._target_=mine.Net", "+model.width=3", "data._target_=mine.Data"]
    finished = train(tmp_path, *overrides, "test=false", "callbacks=none", "logger=none", limit=60)
    assert finished.code != 0
    assert "rank 1 has had enough" in finished.output
    assert finished.rows() == []
