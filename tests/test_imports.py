"""Imports go one way through the rooms, so that a reader can stop at any of them (see CONTRIBUTING.md)."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import lightning_ga

PACKAGE = Path(lightning_ga.__file__).parent
LEVELS = (
    "errors dropout",
    "plan batch",
    "memory",
    "snapshot",
    "loading compat",
    "recompute",
    "chunks",
    "probe",
    "fit",
    "callback",
    "checkpoints",
    "checkpoint_every",
    "elastic",
    "noise_scale models data app",
    "train report batch_size everywhere audited_steps double_precision",
    "audited_weights",
    "audited_script",
    "audit",
    "environment",
)
"""A room imports from itself and from those of earlier levels; rooms of one level know nothing of each other."""
MOST_ROOMS, MOST_ARROWS = 13, 31
"""Of folders and the callback. ``errors.py`` is a vocabulary for all of them, and not counted."""
BESIDE = ("models", "data", "app", "train", "report")
"""Of the command line; they know nothing of the callback, which Hydra binds them to."""
PUBLIC = ("__init__", "callbacks", "counters", "schedule", "split", "testing", "weights")
"""Paths that code outside uses."""
HEAVY = {"hydra", "omegaconf", "timm", "matplotlib", "sklearn", "rich"}


@cache
def modules() -> list[str]:
    files = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts) for path in files)


@cache
def imports(module: str) -> set[str]:
    """Everything that a module imports at its top level, as full names."""
    tree = ast.parse((PACKAGE / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@cache
def own(module: str) -> set[str]:
    """The modules of this package that a module imports."""
    known = set(modules())
    names = {name.removeprefix("lightning_ga.") for name in imports(module) if name.startswith("lightning_ga.")}
    return {name for name in names if name in known}


def room(module: str) -> str:
    return module.split(".")[0]


def outside(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(module)} - {"lightning_ga"}


def test_imports_go_one_way_through_the_rooms() -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names.split()}
    inner = [module for module in modules() if room(module) not in PUBLIC]
    pairs = [(module, name) for module in inner for name in own(module) if room(name) != room(module)]
    assert [(module, name) for module, name in pairs if level[room(name)] >= level[room(module)]] == []


def test_rooms_and_the_arrows_between_them_are_few() -> None:
    rooms = {room(module) for module in modules() if "." in module} | {"callback"}
    arrows = {(room(module), room(name)) for module in modules() for name in own(module)}
    arrows = {(user, used) for user, used in arrows if user != used and {user, used} <= rooms}
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)


def test_arithmetic_needs_the_standard_library_alone() -> None:
    found = {
        module: outside(module) - sys.stdlib_module_names for module in modules() if room(module) in ("plan", "errors")
    }
    assert not any(found.values()), found


def test_the_command_line_does_not_know_the_callback() -> None:
    for module in [module for module in modules() if room(module) in BESIDE]:
        assert not {room(name) for name in own(module)} & {"callback", "loading", "snapshot"}, module
        assert not {"lightning_ga.callback", "lightning_ga.AutoAccumulate"} & imports(module), module


def test_the_callback_needs_nothing_of_the_command_line() -> None:
    """A user who needs only the callback never loads Hydra, timm, matplotlib or scikit-learn.

    ``__init__`` names ``AtomicCheckpointIO``, and loads it when it is used. ``batch_size`` is a command of its own.
    """
    for module in [module for module in modules() if room(module) not in (*BESIDE, "__init__", "batch_size")]:
        assert not {room(name) for name in own(module)} & set(BESIDE), module
        assert not outside(module) & HEAVY, module


def test_imports_make_no_circle() -> None:
    """There is an order in which every module comes after all that it imports."""
    assert len([*TopologicalSorter({module: own(module) for module in modules()}).static_order()]) == len(modules())
