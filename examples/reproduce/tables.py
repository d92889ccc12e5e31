"""A recipe's table, for a terminal and for a page."""

from collections.abc import Iterable

from rich.table import Table

from examples.reproduce.recipe import Recipe, Result

SECONDS = "CPU s"


def markdown(recipe: Recipe, result: Result) -> str:
    """Write a recipe's table for a page, and below it how it was made."""
    headings = ["", *(column.heading for column in recipe.COLUMNS.values()), SECONDS]
    first, *rest = (f"| {' | '.join(line)} |" for line in (headings, *cells(recipe, result)))
    below = f"|---|{'---:|' * (len(headings) - 1)}"
    table = "\n".join((first, below, *rest))
    return f"{table}\n\n{made_with(result)}"


def made_with(result: Result) -> str:
    """Say on what and with what a table was made; versions are in the record."""
    threads = result.environment["threads"]
    return f"Made by `{result.command}` on {result.data}, with {threads} CPU thread{'s' if threads > 1 else ''}."


def cells(recipe: Recipe, result: Result) -> list[list[str]]:
    """Write the rows of a recipe's table."""
    return [
        [
            row.name,
            *(column.text(row.values.get(key)) for key, column in recipe.COLUMNS.items()),
            f"{row.seconds:.0f}",
        ]
        for row in result.rows
    ]


def overview(results: Iterable[tuple[Recipe, Result]]) -> Table:
    """Put the rows of all recipes into one table for a terminal."""
    table = Table("row", "measured", SECONDS)
    table.columns[0].ratio, table.columns[1].ratio = 2, 3
    table.columns[-1].justify = "right"
    for recipe, result in results:
        table.add_row(f"[bold]{recipe.TITLE}[/]", f"[bold]{result.recipe}, {result.data}[/]", "")
        for row in result.rows:
            written = ((column, column.text(row.values.get(key))) for key, column in recipe.COLUMNS.items())
            found = ", ".join(f"{column.heading} {text}" for column, text in written if text)
            table.add_row(row.name, found, f"{row.seconds:.0f}")
        table.add_section()
    return table
