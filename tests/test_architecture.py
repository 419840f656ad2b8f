"""The house keeps its floors: who may import whom."""

import ast
from pathlib import Path

import pytest

import lightning_dp

ROOT = "lightning_dp"
# From the ground up. A module imports from rows below its own, and from its own row.
ROWS = [
    ["errors"],
    ["insight"],
    ["reduction"],
    ["data"],
    ["health"],
    ["cluster"],
    [
        "settings",
        "progress",
        "loaders",
        "watch",
        "checkpoint",
        "last_saves",
        "step_guard",
        "other_namespaces",
        "hydra_job",
        "launch",
        "arrival",
        "after_batch",
        "stop_signals",
    ],
    ["", "strategy", "fabric", "monitor", "callbacks", "config", "demo"],  # "" is the package itself
    ["bench"],
    ["cli"],
]
HEIGHT = {name: height for height, row in enumerate(ROWS) for name in row}
WINGS = ("reduction", "insight", "data", "health", "cluster")  # plain PyTorch
LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning")
TOUCH_PRIVATE_PARTS = (f"{ROOT}.strategy", f"{ROOT}.launch")

Sources = dict[str, str]  # source text by module name; a package ends in ".__init__"


def real_sources() -> Sources:
    folder = Path(lightning_dp.__file__).parent
    return {
        ".".join([ROOT, *path.relative_to(folder).with_suffix("").parts]): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py")
    }


def plain(module: str) -> str:
    return module.removesuffix(".__init__")


def imported_names(module: str, source: str) -> list[str]:
    """Full dotted names of all that a module imports, wherever in it: ``from a import b`` is ``a.b``."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def room(name: str) -> str:
    """What stands right below the package in a dotted name: ``lightning_dp.data.counts`` is in ``data``."""
    return name.split(".")[1] if "." in name else ""


def inner_imports(sources: Sources) -> dict[str, set[str]]:
    """For each module the modules of this package that it imports."""
    known = {plain(module) for module in sources}
    graph = {}
    for module, source in sources.items():
        targets = set()
        for name in imported_names(module, source):
            if name.split(".")[0] == ROOT:
                # A name inside a module leads to the module.
                targets.add(name if name in known or "." not in name else name.rpartition(".")[0])
        graph[plain(module)] = targets
    return graph


def wrong_rows(sources: Sources) -> list[str]:
    found = [f"{plain(m)} stands in no row" for m in sources if room(plain(m)) not in HEIGHT]
    for module, targets in inner_imports(sources).items():
        for target in targets:
            here, there = HEIGHT.get(room(module)), HEIGHT.get(room(target))
            if here is not None and (there is None or there > here):
                found.append(f"{module} imports {target} from above")
    return found


def lightning_in_wings(sources: Sources) -> list[str]:
    return [
        f"{plain(module)} imports {name}"
        for module, source in sources.items()
        if room(plain(module)) in WINGS
        for name in imported_names(module, source)
        if name.split(".")[0] in LIGHTNING
    ]


def private_lightning(sources: Sources) -> list[str]:
    return [
        f"{plain(module)} imports {name}"
        for module, source in sources.items()
        if plain(module) not in TOUCH_PRIVATE_PARTS
        for name in imported_names(module, source)
        if name.split(".")[0] in LIGHTNING
        and any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    ]


def circles(sources: Sources) -> list[str]:
    """Takes away what imports nothing that is left, again and again; what remains goes in circles."""
    graph = inner_imports(sources)
    while True:
        free = {module for module, targets in graph.items() if not targets & graph.keys()}
        if not free:
            return [f"{module} is in a circle, or imports one" for module in graph]
        graph = {module: targets for module, targets in graph.items() if module not in free}


RULES = [wrong_rows, lightning_in_wings, private_lightning, circles]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(rule):
    sources = real_sources()
    assert {"lightning_dp.__init__", "lightning_dp.errors", "lightning_dp.reduction.buckets"} <= sources.keys()
    assert rule(sources) == []


def test_the_checks_see_the_imports_of_the_package():
    graph = inner_imports(real_sources())
    assert "lightning_dp.reduction.ballot" in graph["lightning_dp.reduction.reducer"]  # from ... import ballot as ...
    assert "lightning_dp.errors" in graph["lightning_dp.data.counts"]
    assert "lightning_dp.strategy" in graph["lightning_dp"]


SOUND = {
    "lightning_dp.__init__": "from lightning_dp.strategy import S",
    "lightning_dp.errors": "import torch",
    "lightning_dp.insight.__init__": "",
    "lightning_dp.insight.clock": "import time\nfrom lightning_dp.errors import E",
    "lightning_dp.reduction.__init__": "from lightning_dp.reduction.wire import Wire",
    "lightning_dp.reduction.wire": "from lightning_dp.insight import clock\nfrom . import pack\nfrom .pack import P",
    "lightning_dp.reduction.pack": "from ..errors import E",
    "lightning_dp.strategy": "from lightning_dp.reduction import Wire\nfrom lightning.x import _y",
    "lightning_dp.cli.run": "import lightning_dp\nfrom lightning import Trainer, __version__",
}


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_house_passes(rule):
    assert rule(SOUND) == []


@pytest.mark.parametrize(
    ("rule", "module", "bad"),
    [
        pytest.param(wrong_rows, "errors", "from lightning_dp.insight.clock import C", id="from above"),
        pytest.param(wrong_rows, "insight.clock", "from lightning_dp import reduction", id="a whole wing"),
        pytest.param(wrong_rows, "insight.clock", "import lightning_dp.reduction.wire as w", id="plain import"),
        pytest.param(wrong_rows, "reduction.wire", "from ..strategy import S", id="relative"),
        pytest.param(wrong_rows, "reduction.__init__", "from ..strategy import S", id="relative, in a package"),
        pytest.param(wrong_rows, "reduction.wire", "import lightning_dp", id="the package itself is the front"),
        pytest.param(wrong_rows, "strategy", "def f():\n    from lightning_dp.cli import run", id="inside a function"),
        pytest.param(wrong_rows, "attic.box", "import torch", id="a room that nobody planned"),
        pytest.param(lightning_in_wings, "reduction.wire", "import lightning.pytorch as pl", id="Lightning in a wing"),
        pytest.param(lightning_in_wings, "insight.clock", "from lightning import Trainer", id="Lightning by name"),
        pytest.param(lightning_in_wings, "data.counts", "import pytorch_lightning", id="its old name"),
        pytest.param(lightning_in_wings, "health.check", "if x:\n    import lightning", id="under a condition"),
        pytest.param(private_lightning, "cli.run", "from lightning.pytorch.utilities import _x", id="a private name"),
        pytest.param(private_lightning, "fabric", "from lightning._y import z", id="of a private module"),
        pytest.param(private_lightning, "callbacks", "import lightning._y.z", id="a private module"),
        pytest.param(circles, "reduction.pack", "from lightning_dp.reduction.wire import Wire", id="two in a circle"),
        pytest.param(circles, "errors", "from lightning_dp.reduction import wire", id="a wide circle"),
        pytest.param(circles, "reduction.pack", "from lightning_dp.reduction import Wire", id="by its own package"),
    ],
)
def test_a_breach_is_found(rule, module, bad):
    name = f"lightning_dp.{module}"
    broken = {**SOUND, name: f"{SOUND.get(name, '')}\n{bad}"}
    assert any(plain(name) in line for line in rule(broken))
