"""What a recipe is made of, and the record of its run as JSON."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar, cast

from matplotlib.figure import Figure

Scale = Literal["quick", "medium", "full"]
SCALES: tuple[Scale, ...] = ("quick", "medium", "full")
Value = float | int | str | None
Curve = list[tuple[float, float]]
T = TypeVar("T")
MOST_POINTS = 200  # of a curve in a record
_POINT = re.compile(r"\[\s+([-+.\de]+),\s+([-+.\de]+)\s+\]")


@dataclass(frozen=True, slots=True)
class Setup:
    """How large a recipe is run, and on which data.

    Attributes:
        scale: ``"full"`` is the recipe itself, ``"medium"`` minutes of it, ``"quick"`` a minute.
        data: Folder in which data sets are looked for.
    """

    scale: Scale
    data: str

    def pick(self, *, quick: T, medium: T, full: T) -> T:
        """Choose a value by the scale."""
        return {"quick": quick, "medium": medium, "full": full}[self.scale]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a recipe's table.

    Attributes:
        heading: What stands above it.
        form: How its values are written.
    """

    heading: str
    form: str = "{}"

    def text(self, value: Value) -> str:
        """Write a value; an empty cell where the row has none."""
        return "" if value is None else value if isinstance(value, str) else self.form.format(value)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row found.

    Attributes:
        values: One for each column that the row has, by the column's key.
        curves: Points ``(x, y)`` by name, for the picture; see :func:`thinned`.
    """

    values: Mapping[str, Value]
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """A row that is to be measured.

    Attributes:
        name: Its first column.
        settings: All that its numbers hang on, as plain JSON values: it is measured again where they changed.
        measure: Measures it; is given an empty folder that is removed afterwards.
    """

    name: str
    settings: Mapping[str, Any]
    measure: Callable[[Path], Measured]


@dataclass(frozen=True, slots=True)
class Row:
    """A row that was measured.

    Attributes:
        name: As in its task.
        settings: As in its task.
        seconds: CPU time that measuring took, all threads and processes added up.
        values: See :class:`Measured`.
        curves: See :class:`Measured`.
    """

    name: str
    settings: Mapping[str, Any]
    seconds: float
    values: Mapping[str, Value]
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """A recipe's run.

    Attributes:
        recipe: Its name.
        command: What makes this record.
        scale: How large it was run.
        data: The data that were used, in words.
        environment: Versions and machine.
        rows: What was measured so far.
    """

    recipe: str
    command: str
    scale: Scale
    data: str
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """Find a row by its name."""
        return next(row for row in self.rows if row.name == name)


class Recipe(Protocol):
    """What the module of a recipe has to offer."""

    NAME: str
    TITLE: str
    COLUMNS: Mapping[str, Column]
    __name__: str

    def data_used(self, setup: Setup) -> str:
        """Name the data in words, such as ``"Fashion-MNIST, 6,000 of 60,000 images"``."""

    def rows(self, setup: Setup) -> list[Task]:
        """List what is to be measured, in the table's order."""

    def draw(self, result: Result) -> Figure:
        """Draw the picture of the page."""


def as_recipe(module: ModuleType) -> Recipe:
    """Take a module for a recipe."""
    return cast(Recipe, module)


def thinned(curve: Curve) -> Curve:
    """Average neighbouring points until at most 200 are left; the last point of each group gives its place.

    Examples:
        >>> [len(thinned([(step, 1.0) for step in range(length)])) for length in (200, 201, 401, 5000)]
        [200, 101, 134, 200]
        >>> thinned([(step, float(step)) for step in range(1, 401)])[:2]
        [(2, 1.5), (4, 3.5)]
    """
    size = -(-len(curve) // MOST_POINTS)
    groups = [curve[start : start + size] for start in range(0, len(curve), size or 1)]
    return [(group[-1][0], float(f"{fmean(y for _, y in group):.6g}")) for group in groups]


def write_result(path: Path, result: Result) -> None:
    """Write a record, a point of a curve on a line; a reader never finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    text = json.dumps(asdict(result), indent=1, ensure_ascii=False)
    unfinished.write_text(_POINT.sub(r"[\1, \2]", text) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_result(path: Path) -> Result | None:
    """Read a record; nothing where there is none."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return Result(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})
