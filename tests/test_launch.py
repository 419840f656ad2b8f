"""Local ranks under Hydra: each runs rank 0's job, once, in its folder, from its configuration."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf, open_dict, read_write
from test_train_program import Finished, run_program, train

from lightning_dp import hydra_job, launch
from lightning_dp.config import config_directory, register_configs
from lightning_dp.errors import ConfigurationError

pytestmark = pytest.mark.timeout(240)

# A program of a user's own: a typed configuration, a file read by relative path, one line per job and rank.
PROGRAM = """
import json, os, sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
import hydra, lightning, torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
import lightning_dp

class Speed(Enum):
    slow = 1
    fast = 2

@dataclass
class Config:
    a: int = 1
    speed: Speed = Speed.slow
    strategy: str = "bucketed_ddp"
    folder: str = "${hydra:runtime.output_dir}"
    clock: str = "${now:%H-%M-%S}"

ConfigStore.instance().store("config", Config)
NOTE = Path("note.txt").read_text()

@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg):
    typed = OmegaConf.to_object(cfg)
    cfg.a = 1000  # a program may change its own copy
    trainer = lightning.Trainer(strategy=typed.strategy, devices=2, accelerator="cpu", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    model = BoringModel()
    with torch.no_grad():
        model.layer.weight.fill_(typed.a)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    told = vars(typed) | {"speed": typed.speed.name, "note": NOTE, "cwd": os.getcwd(), "rank": trainer.global_rank}
    told |= {"world": trainer.world_size, "number": HydraConfig.get().job.get("num"), "pid": os.getpid()}
    told |= {"output": HydraConfig.get().runtime.output_dir, "overrides": list(HydraConfig.get().overrides.task)}
    told |= {"weight": model.layer.weight.sum().item()}
    print("JOB " + json.dumps(told) + "\\n", end="", flush=True)
    return float((typed.a - 3) ** 2)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "note.txt").write_text("found")
    return tmp_path


def told(finished: Finished) -> list[dict[str, Any]]:
    """What the jobs said of themselves, by number and rank."""
    assert finished.code == 0, finished.output
    lines = [json.loads(line[4:]) for line in finished.output.splitlines() if line.startswith("JOB ")]
    return sorted(lines, key=lambda line: (line["number"] or 0, line["rank"]))


def same_but_rank(first: dict[str, Any], second: dict[str, Any]) -> bool:
    own = ("rank", "pid")
    return {k: v for k, v in first.items() if k not in own} == {k: v for k, v in second.items() if k not in own}


def sweep(folder: Path, *arguments: str, limit: float = 100) -> Finished:
    return run_program([sys.executable, "program.py", "-m", *arguments], folder, limit)


# ---------------------------------------------------------------------------------------------- sweeps


def test_each_rank_runs_each_job_of_a_sweep_once_in_the_jobs_folder(folder: Path) -> None:
    finished = sweep(folder, "a=1,2", "speed=fast", "hydra.job.chdir=true", "hydra.sweep.dir=all jobs")
    jobs = told(finished)
    assert [(job["number"], job["a"], job["rank"]) for job in jobs] == [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]
    assert all(same_but_rank(*jobs[start : start + 2]) for start in (0, 2))
    for number in (0, 1):
        first, second = jobs[2 * number : 2 * number + 2]
        run = str(folder / "all jobs" / str(number))
        assert first["output"] == first["folder"] == first["cwd"] == run
        assert (first["world"], first["speed"], first["note"]) == (2, "fast", "found")
        assert first["overrides"] == [f"a={number + 1}", "speed=fast"]
        assert first["pid"] != second["pid"]
    # Rank 0 stays; each job has a second rank of its own.
    assert jobs[0]["pid"] == jobs[2]["pid"]
    assert jobs[1]["pid"] != jobs[3]["pid"]
    assert finished.output.count("Launching 2 jobs locally") == 1
    assert "Experimental rerun" not in finished.output
    assert {path.name for path in (folder / "all jobs").iterdir()} == {"0", "1", "multirun.yaml"}
    assert not (folder / "multirun").exists()
    logs = {path.name for path in (folder / "all jobs/0").glob("*.log")}
    assert logs == {"program.log", "program.rank_1.log"}


def test_lightnings_own_launcher_runs_the_whole_sweep_again(folder: Path) -> None:
    """The control: what the test above looks at does differ where a child repeats the command line."""
    finished = sweep(folder, "a=1", "strategy=ddp", "hydra.sweep.dir=all jobs")
    outputs = {job["rank"]: job["output"] for job in told(finished)}
    assert finished.output.count("Launching 1 jobs locally") == 2 or outputs[0] != outputs[1]


def test_a_sweeper_that_decides_by_results_decides_for_all_ranks(folder: Path) -> None:
    trials = ["a=range(1,5)", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    jobs = told(sweep(folder, *trials, "hydra.sweeper.sampler.seed=1", "hydra.sweep.dir=study", limit=150))
    assert [(job["number"], job["rank"]) for job in jobs] == [(n, r) for n in range(2) for r in range(2)]
    assert all(same_but_rank(*jobs[start : start + 2]) for start in (0, 2))
    results = OmegaConf.load(folder / "study/optimization_results.yaml")
    assert results["best_value"] == min((job["a"] - 3) ** 2 for job in jobs)


def test_the_training_program_sweeps(tmp_path: Path) -> None:
    quick = ["trainer.max_epochs=1", "+trainer.limit_train_batches=4", "+trainer.limit_val_batches=1", "test=false"]
    finished = train(tmp_path, "-m", "model.learning_rate=0.01,0.02", "hydra.sweep.dir=all", "callbacks=none", *quick)
    assert finished.code == 0, finished.output
    assert [value for name, value in finished.rows() if name == "world size"] == ["2", "2"]
    assert [value for name, value in finished.rows() if name == "optimizer steps"] == ["4", "4"]
    for number, rate in enumerate((0.01, 0.02)):
        saved = OmegaConf.load(tmp_path / f"all/{number}/config.yaml")
        assert saved.model.learning_rate == rate
        assert saved.output_dir == str(tmp_path / f"all/{number}")
    assert {path.name for path in tmp_path.iterdir()} == {"all"}


# ---------------------------------------------------------------------------------------------- single runs


def test_a_module_with_settings_of_launchers_on_its_command_line(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package/__init__.py").touch()
    (folder / "program.py").rename(folder / "package/program.py")
    # A child that read these again would need the launcher, and would write into a folder of its own.
    arguments = ["a=4", "+hydra.launcher.n_jobs=7", "hydra.output_subdir=null", "hydra.run.dir=its 'own' $folder"]
    arguments[-1] = "hydra.run.dir=\"its 'own' $folder\""
    first, second = told(run_program([sys.executable, "-m", "package.program", *arguments], folder, 100))
    assert same_but_rank(first, second)
    assert (first["a"], first["note"], first["number"]) == (4, "found", None)
    assert first["output"] == str(folder / "its 'own' $folder")
    assert first["cwd"] == str(folder)


# ---------------------------------------------------------------------------------------------- parts


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The training program's job as Hydra sets it up, in this process."""
    register_configs()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        config = compose("train", return_hydra_config=True, overrides=["seed=7"])
    with read_write(config), open_dict(config):
        config.hydra.runtime.output_dir = str(tmp_path)
    setup_globals()
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    yield config
    HydraConfig.instance().cfg = before


def test_a_saved_job_is_the_whole_configuration_with_its_resolvers(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = hydra_job.save_job(3)
    assert file == tmp_path / ".hydra/rank_3.pickle"
    monkeypatch.chdir("/")
    restored = pickle.loads(file.read_bytes())
    assert Path.cwd() == tmp_path
    assert restored.seed == 7
    assert restored.output_dir == str(tmp_path)
    assert OmegaConf.get_type(restored.strategy).__name__ == "BucketedDDPConfig"
    assert Path(restored.hydra.job_logging.handlers.file.filename).name == "train.rank_3.log"
    assert Path(job.hydra.job_logging.handlers.file.filename).name == "train.log"


def test_a_job_in_a_process_of_another_launcher_cannot_start_ranks(job: Any) -> None:
    with read_write(job.hydra), open_dict(job.hydra):
        job.hydra.mode = "MULTIRUN"
        job.hydra.job.num = 0
        job.hydra.launcher = {"_target_": "some.JoblibLauncher"}
    HydraConfig.instance().set_config(job)
    with pytest.raises(ConfigurationError, match=r"some\.JoblibLauncher runs jobs in processes of its own.*spawn"):
        hydra_job.save_job(1)


@pytest.mark.parametrize(
    ("owner", "local_rank", "left"),
    [
        pytest.param("earlier", "0", True, id="another job's"),
        pytest.param(None, "0", True, id="of no job"),
        pytest.param("this", "0", False, id="its own"),
        pytest.param("earlier", "1", False, id="on a rank that was started"),
    ],
)
def test_the_place_of_an_earlier_job_is_left(
    owner: str | None, local_rank: str, left: bool, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_by_launch = {"MASTER_ADDR": "here", "MASTER_PORT": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    name = hydra_job.job_name() if owner == "this" else owner
    before = {"MASTER_ADDR": "there", "MASTER_PORT": None, "NODE_RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None}
    mark = json.dumps({"job": name, "before": before})
    for variable, value in {**set_by_launch, "LOCAL_RANK": local_rank, launch.OWNER: mark}.items():
        monkeypatch.setenv(variable, value)
    launch.leave_earlier_job()
    assert os.environ["MASTER_ADDR"] == ("there" if left else "here")
    for variable in ("MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", launch.OWNER):
        assert (variable in os.environ) is not left
