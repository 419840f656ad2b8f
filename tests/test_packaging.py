"""The wheel holds what it must, and a program installed from it runs outside of the checkout."""

import configparser
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from test_train_program import COMMUNICATION, run_program

import lightning_dp

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    built = run_program(command, folder, limit=100)
    assert built.code == 0, built.output
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of a fresh environment that has the wheel, and borrows its dependencies."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    programs = venv / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, timeout=60)
    # A folder that a .pth file names is searched last, and .pth files in it are not read: an editable install there
    # does not bring the checkout back.
    paths = sysconfig.get_paths()
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(sorted({paths["purelib"], paths["platlib"]})) + "\n")
    return programs


def test_the_wheel_holds_the_package_its_configuration_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"lightning_dp-{lightning_dp.__version__}.dist-info"
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_dp").rglob("*.py")}
    configs = {f"lightning_dp/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert "lightning_dp/conf/train.yaml" in configs
    needed = modules | configs | {"lightning_dp/py.typed", f"{info}/licenses/LICENSE"}
    assert needed - names == set()
    # Neither tests nor examples, nor anything else that would land in site-packages.
    assert {name.split("/")[0] for name in names} == {"lightning_dp", info}
    assert [name for name in names if "test" in name or name.endswith(".pyc")] == []


def test_the_wheel_names_the_programs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [entry_points] = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        parsed = configparser.ConfigParser()
        parsed.read_string(archive.read(entry_points).decode())
    programs = {path.stem for path in (ROOT / "lightning_dp/cli").glob("*.py")} - {"__init__", "one_line_errors"}
    assert dict(parsed["console_scripts"]) == {
        f"lightning-dp-{name}": f"lightning_dp.cli.{name}:main" for name in programs
    }


CALLBACK = """
from lightning.pytorch import Callback
import lightning_dp

class Tell(Callback):
    def on_fit_end(self, trainer, module):
        print(f"rank {trainer.global_rank} trained with {lightning_dp.__file__}\\n", end="", flush=True)
"""


def test_the_installed_program_trains_in_another_folder(installed: Path, tmp_path: Path) -> None:
    # A class of the user's own in that folder: the program's script, unlike `python -m`, does not look there by itself.
    (tmp_path / "mine.py").write_text(CALLBACK)
    overrides = ["experiment=quick", "trainer.max_epochs=1", "+callbacks.tell._target_=mine.Tell"]
    finished = run_program([installed / "lightning-dp-train", *overrides], tmp_path, limit=100)
    table = finished.table()
    assert list(table) == ["test/accuracy", *COMMUNICATION]
    # 41 batches a rank, two to a step.
    assert (table["optimizer steps"], table["samples seen"], table["world size"]) == ("21", "1,296", "2")
    # Small buckets: the experiment's settings were found in the installed package.
    assert int(table["messages per step"].split()[0]) >= 3
    trained_with = dict(re.findall(r"rank (\d) trained with (\S+)", finished.output))
    assert set(trained_with) == {"0", "1"}
    assert all(Path(file).is_relative_to(installed.parent) for file in trained_with.values())


def test_versions_agree(wheel: Path) -> None:
    [newest, *_] = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == lightning_dp.__version__ == wheel.name.split("-")[1]
