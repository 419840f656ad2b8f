"""``lightning-dp-submit``: from a configuration to a batch script, and to sbatch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_dp.cli import submit
from lightning_dp.config import config_directory

Program = Callable[..., str]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs the program in an empty folder; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lightning-dp-submit", *arguments])
        submit.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(program: Program, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs the program, which is to refuse; what it said."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            program(*arguments)
        assert exit_.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("configuration error: ")
        return printed.err

    return run


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {line.partition("=")[0]: line.partition("=")[2].strip('"') for line in lines}


def test_a_dry_run_prints_the_script_of_the_configuration(program: Program, tmp_path: Path) -> None:
    overrides = ["model.learning_rate=0.1", "+data.note='a b $(c)'", "trainer.num_nodes=2", "trainer.devices=4"]
    own = ["dry_run=true", "launcher.partition=long", "launcher.job_name=my run", "+launcher.options.constraint=a|b"]
    script = program(*overrides, *own, "launcher.setup=[module load x]", "+launcher.environment.A=b c")
    told = directives(script)
    assert told.items() >= {"job-name": "my run", "nodes": "2", "ntasks-per-node": "4", "partition": "long"}.items()
    assert told.items() >= {"cpus-per-task": "4", "time": "01:00:00", "signal": "USR1@120", "constraint": "a|b"}.items()
    assert told["chdir"] == str(tmp_path)
    assert told["output"] == f"{tmp_path}/runs/slurm/%j.out"
    assert not {"account", "qos", "mem", "gpus-per-node", "array"} & told.keys()
    *_, arguments, last = script.splitlines()
    # The submission's own settings are not the training's.
    assert shlex.split(arguments.removeprefix("arguments=(").removesuffix(")")) == overrides
    srun = ["exec", "srun", "--kill-on-bad-exit=1", "--cpus-per-task=4", sys.executable, "-m", "lightning_dp.cli.train"]
    assert shlex.split(last)[: len(srun)] == srun
    assert {"module load x", "export A='b c'"} <= set(script.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_gpus_and_a_command_of_the_users_own(program: Program) -> None:
    shape = ["trainer=gpu", "trainer.devices=[0,1]", "trainer.num_nodes=3", "launcher.gpus_per_node=2"]
    script = program("dry_run=true", "launcher=multi_node", *shape, "launcher.command=[python, train.py]")
    assert directives(script).items() >= {"nodes": "3", "ntasks-per-node": "2", "gpus-per-node": "2"}.items()
    assert " python train.py " in script.splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (["launcher=multi_node", "trainer.devices=[0,1]"], "2"),
        (["trainer.devices=4", "launcher.gpus_per_node=a100:4"], "a100:4"),
        (["trainer.devices=1", "launcher.gpus_per_node=a100"], "a100"),
    ],
)
def test_gpus_by_list_or_type(program: Program, overrides: list[str], gpus: str) -> None:
    assert directives(program("dry_run=true", "trainer=gpu", *overrides))["gpus-per-node"] == gpus


@pytest.mark.parametrize("file", [*(config_directory() / "launcher").glob("*.yaml")], ids=lambda file: file.stem)
def test_every_launcher_has_a_comment_on_each_key_and_makes_a_script_or_a_command(file: Path, program: Program) -> None:
    lines = file.read_text().splitlines()
    bare = [line for above, line in pairwise(lines) if line[:1].isalpha() and not above.startswith("#")]
    assert [line for line in bare if line != "defaults:"] == []
    printed = program("dry_run=true", f"launcher={file.stem}", "launcher.gpus_per_node=2")
    assert "lightning_dp.cli.train" in printed
    assert printed.startswith("#!/bin/bash") is (file.stem != "laptop")


def test_a_sweep_is_a_job_array(program: Program) -> None:
    script = program("-m", "dry_run=true", "seed=1,2", "model.channels=8,16", "launcher.max_parallel=3")
    assert directives(script)["array"] == "0-3%3"
    points = [line.split("(", 1)[1].split(")")[0] for line in script.splitlines() if ") arguments=(" in line]
    assert points == [f"seed={seed} model.channels={width}" for seed in (1, 2) for width in (8, 16)]


def test_a_users_folder_of_configurations_is_passed_on(program: Program, tmp_path: Path) -> None:
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/wide.yaml").write_text("# @package _global_\nmodel:\n  channels: 64\n")
    script = program("--config-dir", "mine", "experiment=wide", "dry_run=true")
    assert f"lightning_dp.cli.train --config-dir {tmp_path}/mine " in script.splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launcher.nodes=1", "trainer.num_nodes=2"], ["2 (trainer.num_nodes)  1 (launcher.nodes)", "<-- differs"]),
        (["launcher.tasks_per_node=4"], ["2 (trainer.devices)", "4 (launcher.tasks_per_node)"]),
        (["trainer=gpu", "trainer.devices=2"], ["GPUs per node", "0 (launcher.gpus_per_node)"]),
        (["trainer=gpu"], ["trainer.devices=auto says no number of tasks"]),
        (["launcher.job_name='a\nb'"], ["line break"]),
        (["launcher.partitoin=x"], ["launcher.partitoin is no key of launcher", "partition"]),
        (["strategy.bucket_cap=1"], ["strategy.bucket_cap is no key of strategy"]),
        (["trainer=gpu", "trainer.devices=4", "launcher.gpus_per_node=a100:2"], ["2 (launcher.gpus_per_node)"]),
        (["launcher.scheduler=slrum"], ["launcher.scheduler=slrum is not known: use one of slurm, none"]),
        (["launcher=laptop", "trainer.num_nodes=2"], ["2 (trainer.num_nodes)", "1 (this machine)"]),
        (["-m", "trainer.devices=1,2"], ["all tasks of a job array ask for the same"]),
    ],
)
def test_what_cannot_be_submitted_is_refused(refused: Program, overrides: list[str], words: list[str]) -> None:
    message = refused(*overrides, "dry_run=true")
    assert [word for word in words if word not in message] == []


def test_without_sbatch_the_way_to_a_script_is_shown(refused: Program) -> None:
    message = refused("launcher.sbatch=[no-such-program]")
    assert "no-such-program is not on the PATH" in message
    assert "dry_run=true" in message


SBATCH = '#!/bin/bash\ncat >script; printf "%s\\n" "$@" >arguments; [ "$1" = --parsable ] && echo "17;cluster"\n'


def test_sbatch_gets_the_script_and_a_copy_is_kept_by_job_id(program: Program, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    printed = program(f"launcher.sbatch=[{tmp_path}/sbatch]", "launcher.folder=jobs")
    assert printed == f"submitted job 17; output and runs: {tmp_path}/jobs\n"
    assert (tmp_path / "arguments").read_text() == "--parsable\n"
    text = (tmp_path / "script").read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --requeue\n")
    assert (tmp_path / "jobs/17.sbatch").read_text() == text


def test_what_sbatch_says_when_it_refuses_is_passed_on(refused: Program, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\ncat >/dev/null; echo 'invalid partition' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert "refused the job: invalid partition" in refused(f"launcher.sbatch=[{tmp_path}/sbatch]")


def test_on_a_laptop_the_training_runs_here(program: Program, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text('#!/bin/bash\nprintf "%s\\n" "$A" "$@" >told\n')
    (tmp_path / "mine").chmod(0o755)
    own = ["launcher=laptop", f"launcher.command=[{tmp_path}/mine]", "+launcher.environment.A=b c"]
    assert "mine 'model.note=a b'\n" in program(*own, "dry_run=true", "+model.note=a b").replace("+", "")
    program(*own, "+model.note=a b")
    assert (tmp_path / "told").read_text().splitlines() == ["b c", "+model.note=a b"]


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -TERM $$", 128 + 15)])
def test_on_a_laptop_a_training_that_fails_ends_the_command_as_it_ended(
    program: Program, tmp_path: Path, end: str, code: int
) -> None:
    (tmp_path / "mine").write_text(f"#!/bin/bash\necho x >>told\n{end}\n")
    (tmp_path / "mine").chmod(0o755)
    with pytest.raises(SystemExit) as exit_:
        program("-m", "launcher=laptop", f"launcher.command=[{tmp_path}/mine]", "seed=1,2")
    assert exit_.value.code == code
    assert (tmp_path / "told").read_text() == "x\n"
