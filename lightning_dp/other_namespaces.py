"""Lightning's older names, ``pytorch_lightning`` and ``lightning_fabric``: other classes, refused in one line."""

from __future__ import annotations

import sys
from typing import NoReturn

from lightning_dp.errors import ConfigurationError
from lightning_dp.settings import NAMES

# Where each keeps its strategies, what its registry is called, and what to import in its place.
_REGISTRIES = (
    ("pytorch_lightning.strategies", "StrategyRegistry", "lightning.pytorch"),
    ("lightning_fabric.strategies", "STRATEGY_REGISTRY", "lightning.fabric"),
)


def refuse_in_other_namespaces() -> None:
    """Makes the strategy's names answer with what to import, in those namespaces that are loaded already.

    One that is loaded later refuses the name by itself, as one that it does not know.
    """
    for module, registry, instead in _REGISTRIES:
        if module not in sys.modules:
            continue
        known = getattr(sys.modules[module], registry)
        for name in NAMES:
            if name not in known:
                known.register(name, _refuse, namespace=module.split(".")[0], instead=instead)


def _refuse(namespace: str, instead: str) -> NoReturn:
    raise ConfigurationError(
        f"bucketed_ddp works with {instead}, and this is {namespace}, whose classes are others: import {instead} in the"
        " whole program, for modules, callbacks and data too"
    )
