"""The table of all clients, and every number behind it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.output import as_text, error, installed, read_json, write_json
from clients.modes import Row

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "results" / "clients.md"
CLIENTS = ("pytorch-forecasting", "torch-geometric", "lightly", "transformers", "monai", "gluonts", "darts")
IN_ALL = ("exact", "right")
BELOW = ("torchvision", "torch", "lightning", "pytorch-lightning")


def text(rows: Sequence[Row], versions: Mapping[str, str | None]) -> str:
    """The table in 80 columns; a program that is exact and right in all modes has one row, its largest numbers.

    Of the others, whole batches (``alone``) have a row only if they are not right.
    """
    table = Table(box=box.HORIZONTALS, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("program and mode", max_width=28)
    for name in ("factor", "gradient", "weights"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("said", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    programs = [(name, [*modes]) for name, modes in groupby(rows, lambda row: f"{row.client}: {row.name}")]
    for program, of in programs:
        if _is_right_in_all(of):
            table.add_row(
                program, "", _largest(row.gradient for row in of), _largest(row.weights for row in of), *IN_ALL
            )
    for program, of in programs:
        if not _is_right_in_all(of):
            table.add_section()
            table.add_row(program)
            for row in of:
                if (row.mode, row.verdict) != ("alone", "right"):
                    factor = "–" if row.factor is None else str(row.factor)
                    cells = factor, _number(row.gradient), _number(row.weights), row.cause or "–", row.verdict
                    table.add_row(f"  {row.mode}", *cells)
    lines = [", ".join(f"{name} {versions[name]}" for name in names) for names in (CLIENTS[:4], CLIENTS[4:], BELOW)]
    return as_text(table, ",\n".join(lines))


def _is_right_in_all(modes: Iterable[Row]) -> bool:
    return all((row.cause, row.verdict) == IN_ALL for row in modes)


def _largest(values: Iterable[float | None]) -> str:
    return _number(max(value or 0.0 for value in values))


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else error(value)


def details(rows: Sequence[Row]) -> str:
    """What was said in each row that is not simply right."""
    lines: list[str] = []
    for row in rows:
        if row.verdict != "right":
            lines += ["", f"{row.client}: {row.name}, {row.mode} ({row.setting}): {row.verdict}"]
            lines += [f"  {line}" for line in (row.sentence, row.error, *row.told) if line]
    return "\n".join(lines)


def write(rows: Sequence[Row], versions: Mapping[str, str | None]) -> None:
    """Put the table into the documentation, and its numbers beside this file."""
    begin, end = "<!-- clients -->\n", "<!-- end -->"
    before, after = PAGE.read_text().split(begin)
    PAGE.write_text(f"{before}{begin}```text\n{text(rows, versions)}\n```\n{end}{after.split(end, 1)[1]}")
    write_json("table", {"versions": versions, "rows": [asdict(row) for row in rows]}, FOLDER)


def merged(rows: Sequence[Row]) -> list[Row]:
    """The rows of the last run, with those of some programs in place of their last ones."""
    last = [Row(**{**row, "told": tuple(row["told"])}) for row in read_json("table", FOLDER)["rows"]]
    again = {(row.client, row.name) for row in rows}
    kept = [row for row in last if (row.client, row.name) not in again]
    return sorted([*kept, *rows], key=lambda row: row.client)


def found_versions() -> dict[str, str | None]:
    """The versions of all clients; of those that are not installed, the last run's."""
    last = read_json("table", FOLDER)["versions"]
    return {name: installed(name) or last[name] for name in CLIENTS + BELOW}
