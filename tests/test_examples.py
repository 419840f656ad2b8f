"""The examples run as they are and print what they promise."""

import re
import sys
from pathlib import Path

import pytest
from test_train_program import run_program

EXAMPLES = Path(__file__).parents[1] / "examples"


def said_by(name: str, folder: Path, launcher: tuple[str, ...] = ()) -> str:
    finished = run_program([sys.executable, *launcher, EXAMPLES / name], folder, limit=90)
    assert finished.code == 0, finished.output
    # An example leaves nothing behind in the folder where it is run.
    assert list(folder.iterdir()) == []
    return finished.output


def test_each_example_is_run_here_and_listed_in_the_readme() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == {"minimal.py", "tokens.py", "reducer_only.py"}
    assert files == set(re.findall(r"^\| `(\w+\.py)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))


def test_minimal_learns_the_line(tmp_path: Path) -> None:
    # Said once, although two ranks run the file.
    [(slope, offset)] = re.findall(r"learnt y = (\S+) x ([+-]\S+)", said_by("minimal.py", tmp_path))
    assert float(slope) == pytest.approx(3, abs=0.02)
    assert float(offset) == pytest.approx(-1, abs=0.02)


def test_tokens_learns_and_counts_every_token_once_an_epoch(tmp_path: Path) -> None:
    output = said_by("tokens.py", tmp_path)
    [(loss, tokens)] = re.findall(r"loss (\S+) tokens (\d+)", output)
    assert float(loss) < 0.1  # guessing one of eight symbols: 2.08
    [report] = re.findall(r"RunReport\((.*)\)", output)
    figures = dict(pair.split("=") for pair in report.split(", "))
    assert figures["world_size"] == "2"
    assert int(figures["count"]) == 6 * int(tokens)
    # 256 sequences a rank: 16 batches of 16, two to a step; six epochs.
    assert figures["steps"] == "48"
    assert figures["skipped_steps"] == "0"


@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")],
    ids=["alone", "torchrun"],
)
def test_reducer_only_equals_one_process(launcher: tuple[str, ...], tmp_path: Path) -> None:
    output = said_by("reducer_only.py", tmp_path, launcher)
    [difference] = re.findall(r"largest difference to one process after 5 steps: (\S+)", output)
    assert float(difference) < 1e-12
