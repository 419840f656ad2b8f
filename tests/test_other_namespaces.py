"""What ``pytorch_lightning`` and ``lightning_fabric`` say to the strategy, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINER = "import pytorch_lightning; pytorch_lightning.Trainer(strategy={}, accelerator='cpu', devices=1)"
FABRIC = "import lightning_fabric; lightning_fabric.Fabric(strategy='bucketed_ddp', accelerator='cpu', devices=1)"


def last_line(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("before", "program", "message"),
    [
        pytest.param(
            "import pytorch_lightning, lightning_dp",
            TRAINER.format("'bucketed_ddp'"),
            "lightning_dp.errors.ConfigurationError: bucketed_ddp works with lightning.pytorch, and this is"
            " pytorch_lightning, whose classes are others: import lightning.pytorch in the whole program",
            id="Trainer",
        ),
        pytest.param(
            "import lightning_fabric, lightning_dp",
            FABRIC,
            "lightning_dp.errors.ConfigurationError: bucketed_ddp works with lightning.fabric, and this is"
            " lightning_fabric",
            id="Fabric",
        ),
        pytest.param(
            "import lightning_dp",
            TRAINER.format("'bucketed_ddp_spawn'"),
            "ValueError: You selected an invalid strategy name: `strategy='bucketed_ddp_spawn'`. It must be either a"
            " string or an instance of `pytorch_lightning.strategies.Strategy`",
            id="loaded later",
        ),
        pytest.param(
            "import lightning_dp",
            TRAINER.format("lightning_dp.BucketedDDPStrategy()"),
            "ValueError: You selected an invalid strategy name: `strategy=<lightning_dp.strategy.BucketedDDPStrategy",
            id="an object",
        ),
    ],
)
def test_is_refused_in_one_line(before: str, program: str, message: str) -> None:
    assert last_line(f"{before}\n{program}").startswith(message)


def test_a_module_of_theirs_is_refused_by_the_trainer() -> None:
    program = (
        "import lightning, pytorch_lightning, lightning_dp\n"
        "class M(pytorch_lightning.LightningModule): pass\n"
        "lightning.Trainer(strategy='bucketed_ddp', accelerator='cpu', devices=1, logger=False).fit(M())"
    )
    assert last_line(program).startswith("TypeError: `model` must be a `LightningModule`")
