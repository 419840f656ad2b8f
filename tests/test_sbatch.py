"""Batch scripts: whatever the values, the shell runs one command with exactly these arguments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dp.cluster.sbatch import FOLDER_OVERRIDE, FOLDER_VARIABLE, BatchScript
from lightning_dp.errors import ConfigurationError

SCRIPT = BatchScript("name", 2, 4, "/runs", "/project", ["train"], [["a=1", "b=x y"]])
# Stands in for srun: tells its arguments, and the folder that it was given.
SRUN = f'#!/bin/bash\nprintf "%s\\0" "$@" "${FOLDER_VARIABLE}" >"$TOLD"\n'

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
NASTY = st.sampled_from(
    ["$(touch broken)", "`touch broken`", "'; touch broken; '", '"; touch broken; "', "\ntouch broken\n"]
)
NASTY |= st.sampled_from(
    ["\n#SBATCH --array=0-9\n", "*", "~", "!!", "\\", "-", "", "a#b", "$HOME", "${x:-y}", ")", "esac"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shell")
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    return folder


def run(script: str, folder: Path, **environment: str) -> list[str]:
    """What srun is called with when bash runs the script, and the job's folder."""
    told = folder / "told"
    told.unlink(missing_ok=True)
    (folder / "script.sh").write_bytes(script.encode())
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TOLD": str(told), "SLURM_JOB_ID": "7", **environment}
    for flags in (["-n"], []):
        done = subprocess.run(
            ["bash", *flags, folder / "script.sh"], env=env, cwd=folder, capture_output=True, timeout=20
        )
        assert (done.returncode, done.stderr) == (0, b""), script
    assert not (folder / "broken").exists(), script
    return told.read_bytes().decode().split("\0")[:-1]


def directives(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith("#SBATCH")]


def expected(script: BatchScript, variant: Sequence[str], job: str) -> list[str]:
    start = ["--kill-on-bad-exit=1", *script.srun_arguments, *script.command]
    return [*start, *variant, FOLDER_OVERRIDE, f"{script.folder}/{job}"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(WORDS | NASTY, max_size=4), word=WORDS | NASTY, value=WORDS | NASTY)
def test_arguments_arrive_as_they_are(folder: Path, arguments: list[str], word: str, value: str) -> None:
    script = replace(
        SCRIPT,
        command=["train", word],
        variants=[arguments],
        srun_arguments=[f"--container={word}"],
        environment={"MINE": value},
    )
    assert run(script.render(), folder) == expected(script, arguments, "7")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variants=st.lists(st.lists(WORDS | NASTY, max_size=3), min_size=2, max_size=4), data=st.data())
def test_each_task_of_an_array_gets_its_own_arguments(
    folder: Path, variants: list[list[str]], data: st.DataObject
) -> None:
    script = replace(SCRIPT, variants=variants, max_parallel=2)
    task = data.draw(st.integers(0, len(variants) - 1))
    told = run(script.render(), folder, SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID=str(task))
    assert told == expected(script, variants[task], f"40_{task}")
    assert f'#SBATCH --array="0-{len(variants) - 1}%2"' in directives(script.render())


@settings(max_examples=150, deadline=None)
@given(name=WORDS | NASTY, path=WORDS | NASTY)
def test_a_name_or_path_makes_neither_a_line_nor_an_option(name: str, path: str) -> None:
    script = replace(SCRIPT, name=name, working_directory=f"/{path}")
    plain = SCRIPT.render().splitlines()
    try:
        lines = script.render().splitlines()
    except ConfigurationError as error:
        assert "\n" not in str(error)
        assert not (name.isprintable() and path.isprintable())
        return
    assert len(lines) == len(plain)
    changed = [new for old, new in zip(plain, lines, strict=True) if old != new]
    assert all(line.startswith(("#SBATCH --job-name=", "#SBATCH --chdir=")) for line in changed)
    told = {
        line.split("=", 1)[0]: unquote(line.split("=", 1)[1]) for line in directives(script.render()) if "=" in line
    }
    assert told["#SBATCH --job-name"] == name
    assert told["#SBATCH --chdir"] == f"/{path}"


def unquote(text: str) -> str:
    """By sbatch's rules: a backslash keeps the next character, a double quote opens or closes."""
    value, inside, position = "", False, 0
    while position < len(text):
        if text[position] == "\\":
            position += 1
            value += text[position]
        elif text[position] == '"':
            inside = not inside
        else:
            assert inside, f"outside of quotes: {text}"
            value += text[position]
        position += 1
    assert not inside
    return value


def test_without_quoting_the_checks_above_would_fail(folder: Path) -> None:
    """The control: a script that pastes values in is broken by them."""
    pasted = SCRIPT.render().replace("'b=x y'", "b=$(touch broken)")
    with pytest.raises(AssertionError):
        run(pasted, folder)
    (folder / "broken").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "two\nlines"}, "job-name 'two\\nlines' holds a line break"),
        ({"name": "x" * 1001}, "job-name is longer than 1000 bytes"),
        ({"folder": "/a\\b"}, "holds a backslash"),
        ({"options": {"time\n#SBATCH --x": 1}}, "is no option of sbatch"),
        ({"environment": {"A B": "1"}}, "'A B' is no name of an environment variable"),
        ({"command": ["train", "a\0b"]}, "holds a NUL character"),
    ],
)
def test_what_no_script_can_hold_is_refused(change: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        replace(SCRIPT, **change).render()  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_a_percent_sign_in_the_folder_is_no_pattern() -> None:
    script = replace(SCRIPT, folder="/100%u")
    assert '#SBATCH --output="/100%%u/%j.out"' in directives(script.render())


def test_setup_stands_as_it_is_and_its_failure_ends_the_job(folder: Path) -> None:
    script = replace(SCRIPT, setup=["x=1 && echo $x", "false"]).render()
    assert "x=1 && echo $x" in script.splitlines()
    with pytest.raises(AssertionError):
        run(script, folder)
