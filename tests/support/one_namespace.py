"""Imports the package where ``pytorch_lightning`` is not installed."""

import sys
from collections.abc import Callable
from importlib import import_module, util
from importlib.abc import MetaPathFinder
from typing import Any

import lightning.pytorch as pl

ABSENT = "pytorch_lightning"
ROOMS = ("callback", "planning", "train", "report", "testing", "weights", "models", "data")


class Blocked(MetaPathFinder):
    """Finds no module of the older namespace."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == ABSENT:
            raise ModuleNotFoundError(name)


def nothing_of_it(found: Callable[..., Any]) -> Callable[..., Any]:
    """``importlib.util.find_spec`` that knows the older namespace as little."""
    return lambda name, *rest: None if name == ABSENT else found(name, *rest)


def main() -> None:
    """Forget what is imported, and import all that is public anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in (ABSENT, "lightning_ga")]:
        del sys.modules[name]
    sys.meta_path.insert(0, Blocked())
    util.find_spec = nothing_of_it(util.find_spec)
    package = import_module("lightning_ga")
    for name in package.__all__:
        getattr(package, name)
    for name in ROOMS:
        import_module(f"lightning_ga.{name}")
    assert isinstance(package.AutoAccumulate(), pl.Callback)
    assert ABSENT not in sys.modules
