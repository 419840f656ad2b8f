"""The pytest plugin that re-aims Lightning's own tests does re-aim them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What a test of Lightning's looks like. Each line holds only where the plugin is loaded, or only where it is not.
SUITE = """
import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

NAMES = ["ddp", "ddp_spawn", "ddp_fork", "ddp_find_unused_parameters_true"]


@pytest.mark.parametrize("name", NAMES)
def test_trainer(name):
    strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy).__module__ == "lightning_dp.strategy"
    assert strategy._start_method == {"ddp_spawn": "spawn", "ddp_fork": "fork"}.get(name, "popen")


@pytest.mark.parametrize("name", NAMES)
def test_fabric(name):
    assert type(Fabric(strategy=name, accelerator="cpu", devices=2).strategy).__module__ == "lightning_dp.fabric"


def test_classes():
    assert DDPStrategy.__module__ == "lightning_dp.strategy"
    assert FabricDDP.__module__ == "lightning_dp.fabric"
    assert DDPStrategy(find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}


def test_ddp_configure_ddp():
    raise AssertionError("a listed difference")
"""


def run(folder: Path, *plugin: str) -> str:
    suite = folder / "tests_pytorch" / "strategies" / "test_ddp.py"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *plugin, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip().splitlines()[-1]


def test_with_the_plugin_every_ddp_name_makes_our_strategy(tmp_path: Path) -> None:
    assert run(tmp_path, "-p", "retarget_lightning").startswith("9 passed, 1 xfailed")


def test_without_it_none_does(tmp_path: Path) -> None:
    assert run(tmp_path).startswith("10 failed")
