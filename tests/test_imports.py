"""Imports go down one list only, so that a reader can stop at any level (see CONTRIBUTING.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_ga

PACKAGE = Path(lightning_ga.__file__).parent
PURE = (
    "attempts",
    "curve",
    "errors",
    "events",
    "plan",
    "replay",
    "results",
    "schedule",
    "search",
    "segments",
    "throughput",
    "trace",
    "weights",
    "windows",
)
COMMAND_LINE = (
    *("allowlist", "build", "checkpoints", "cli_errors", "plots", "progress", "report", "scores", "tasks", "train"),
    "values",
)


def modules() -> list[str]:
    files = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts) for path in files)


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


def own(module: str) -> set[str]:
    """The modules of this package that a module imports."""
    known = set(modules())
    names = {name.removeprefix("lightning_ga.") for name in imports(module) if name.startswith("lightning_ga.")}
    return {name for name in names if name in known}


def roots(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(module)}


@pytest.mark.parametrize("module", [module for module in PURE if module in modules()])
def test_pure_modules_import_the_standard_library_and_each_other(module: str):
    """Arithmetic is tested without torch and without a Trainer."""
    assert roots(module) <= sys.stdlib_module_names | {"lightning_ga"}
    assert own(module) <= set(PURE)


@pytest.mark.parametrize("module", [m for m in modules() if m.split(".")[0] in (*COMMAND_LINE, "models", "data")])
def test_the_command_line_does_not_know_the_callback(module: str):
    """Hydra binds them: models, data and train work with any callbacks.

    ``device`` holds a setting that whoever plans reads, and a record of what was planned.
    """
    allowed = {*COMMAND_LINE, "atomic", "device", "errors", "plan", "results", "exactness", "steps"}
    assert {name for name in own(module) if name.split(".")[0] not in ("models", "data")} <= allowed
    assert not {"lightning_ga.callback", "lightning_ga.AutoAccumulate"} & imports(module)


@pytest.mark.parametrize("module", [m for m in modules() if m.split(".")[0] not in (*COMMAND_LINE, "models", "data")])
def test_the_callback_does_not_know_the_command_line(module: str):
    """A user who needs only the callback never loads Hydra, timm, matplotlib or scikit-learn."""
    assert not own(module) & set(COMMAND_LINE)
    assert not roots(module) & {"hydra", "omegaconf", "timm", "matplotlib", "sklearn", "rich"}


@pytest.mark.parametrize("module", modules())
def test_imports_make_no_circle(module: str):
    """Going down from a module never leads back to it."""
    below, todo = set(), own(module)
    while todo:
        name = todo.pop()
        if name not in below:
            below.add(name)
            todo |= own(name)
    assert module not in below


def test_importing_the_package_is_light():
    """None of what only the command line needs is loaded."""
    code = "import sys, lightning_ga; print(sorted({'hydra', 'timm', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
