"""Run a recipe row by row; what was measured before is kept."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.output import environment
from examples.reproduce.recipe import Recipe, Result, Row, Setup, Task, read_result, thinned, write_result


def reproduce(
    recipe: Recipe,
    setup: Setup,
    folder: Path,
    *,
    again: bool = False,
    tell: Callable[[str], object] = print,
) -> Result:
    """Measure the rows of a recipe that have not been measured with these settings, and write each one at once.

    Args:
        recipe: The recipe's module.
        setup: Its scale and data.
        folder: Where records lie, in a folder for each scale.
        again: Measure all rows again.
        tell: Told the name of each row before it is measured.
    """
    path = result_path(folder, setup, recipe)
    tasks = recipe.rows(setup)
    versions = environment()
    rows = {} if again else kept(read_result(path), tasks, versions)
    command = f"python -m examples.reproduce {recipe.NAME}{option(setup)}"
    for task in tasks:
        if task.name not in rows:
            tell(f"{recipe.NAME}: {task.name}")
            rows[task.name] = measured(task)
        done = tuple(rows[other.name] for other in tasks if other.name in rows)
        write_result(path, Result(recipe.NAME, command, setup.scale, recipe.data_used(setup), versions, done))
    result = read_result(path)
    assert result is not None
    return result


def result_path(folder: Path, setup: Setup, recipe: Recipe) -> Path:
    """Name the file of a recipe's record."""
    return folder / setup.scale / f"{recipe.NAME}.json"


def option(setup: Setup) -> str:
    """Write the option that chooses a scale; none for the recipe itself."""
    return {"quick": " --quick", "medium": " --medium", "full": ""}[setup.scale]


def kept(before: Result | None, tasks: list[Task], versions: Mapping[str, Any]) -> dict[str, Row]:
    """Find the rows of an earlier run that stay: same settings, versions and machine."""
    if before is None or plain(before.environment) != plain(versions):
        return {}
    old = {row.name: row for row in before.rows}
    same = (task.name for task in tasks if task.name in old and plain(old[task.name].settings) == plain(task.settings))
    return {name: old[name] for name in same}


def measured(task: Task) -> Row:
    """Measure one row in an empty folder, and the CPU time that it takes."""
    with TemporaryDirectory(prefix="reproduce-") as folder:
        started = processor_seconds()
        found = task.measure(Path(folder))
        seconds = processor_seconds() - started
    curves = {name: thinned(curve) for name, curve in found.curves.items()}
    return Row(task.name, task.settings, round(seconds, 2), found.values, curves)


def processor_seconds() -> float:
    """Add up the CPU time of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def plain(value: Any) -> Any:
    """Give a value as JSON holds it: tuples are lists."""
    return json.loads(json.dumps(value))
