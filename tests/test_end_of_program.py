"""At the end of a program no thread of the process group is left that could need an interpreter that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dp import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads under /proc")

BEGINNING = """
import atexit
import os
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})


def tell() -> None:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    # In one piece: where output is not buffered, two ranks' pieces would mix.
    os.write(1, f"{{len([name for name in names if 'gloo_runloop' in name])}} left\\n".encode())


atexit.register(tell)  # what is registered later is called before
"""

FABRIC = """
from lightning.fabric import Fabric
from test_fabric import *

fabric = Fabric(accelerator="cpu", devices=2, strategy={name!r})
fabric.launch()
model = net()
model, optimizer = fabric.setup(model, optimizer_of("sgd", model.parameters()))
for index in range(3):
    fabric.backward(loss_of(model, samples(index, fabric.global_rank, 2)))
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINER = """
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_dp

model = BoringModel()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy={name!r}, max_steps=3, limit_val_batches=1, **quiet)
trainer.fit(model)
trainer.test(model)
"""


def threads_left(tmp_path: Path, rest: str, name: str) -> tuple[int, list[str]]:
    """How a program ended, and what each of its ranks counted at its end."""
    script = tmp_path / "script.py"
    script.write_text((BEGINNING + rest).format(tests=str(Path(__file__).parent), name=name))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, [line for line in done.stdout.splitlines() if line.endswith(" left")]


@pytest.mark.parametrize("rest", [FABRIC, TRAINER], ids=["fabric", "trainer"])
def test_no_thread_of_the_process_group_is_left(tmp_path: Path, rest: str) -> None:
    assert threads_left(tmp_path, rest, "bucketed_ddp") == (0, ["0 left"] * 2)


def test_the_count_sees_threads_that_are_left(tmp_path: Path) -> None:
    _, counts = threads_left(tmp_path, TRAINER, "ddp")  # it may end with SIGABRT: that is the fault
    assert len(counts) == 2
    assert "0 left" not in counts


OWN = """
import os

import torch.distributed as dist

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")


def leave() -> None:
    dist.destroy_process_group()  # raises if somebody else has taken it down
    print("own left", flush=True)


atexit.register(leave)
"""
ONE_RANK = TRAINER.replace("devices=2", "devices=1")


def test_a_group_of_the_users_own_is_left_to_its_user(tmp_path: Path) -> None:
    code, lines = threads_left(tmp_path, OWN + ONE_RANK, "bucketed_ddp")
    assert (code, lines[0]) == (0, "own left")


def test_a_process_that_was_forked_leaves_its_parents_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[bool] = []
    monkeypatch.setattr(launch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: destroyed.append(True))
    launch.leave_group(os.getppid())
    assert destroyed == []
    launch.leave_group(os.getpid())
    launch.leave_group()
    assert destroyed == [True, True]
