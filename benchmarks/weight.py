"""How heavy are the rooms of the package, and how much is folded into a statement? ``make weight``.

Statements of each room (docstrings and imports do not count), and its shape: tuple assignments (``a, b = x, y``),
conditional expressions and comprehensions per 1,000 statements, and the expression nodes of an average simple
statement. NO marks a room whose shape is above an aim, or a package that is too heavy.
"""

import ast
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.output import shown

PACKAGE = Path(__file__).parents[1] / "lightning_ga"
MOST_STATEMENTS = 8900
MOST_TUPLES = 6.0
MOST_CONDITIONALS = 25.0
MOST_COMPREHENSIONS = 35.0
MOST_NODES = 7.0
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert, ast.Delete)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COLUMNS = ("statements", "tuples", "conditionals", "comprehensions", "nodes", "")


@dataclass
class Shape:
    """Counts over some source text."""

    statements: int = 0
    simple: int = 0
    nodes: int = 0
    tuples: int = 0
    conditionals: int = 0
    comprehensions: int = 0

    def add(self, text: str) -> None:
        """Count the source text of a file, too.

        Examples:
            >>> shape = Shape()
            >>> shape.add("import os\\na, b = 1, 2\\nc = [x if x else 0 for x in (a, b)]\\n")
            >>> shape.statements, shape.tuples, shape.conditionals, shape.comprehensions
            (2, 1, 1, 1)
        """
        for node in ast.walk(ast.parse(text)):
            if is_counted(node):
                self.statements += 1
                if isinstance(node, SIMPLE):
                    self.simple += 1
                    self.nodes += sum(isinstance(each, ast.expr) for each in ast.walk(node))
            self.tuples += is_tuple_assignment(node)
            self.conditionals += isinstance(node, ast.IfExp)
            self.comprehensions += isinstance(node, COMPREHENSIONS)

    def join(self, other: "Shape") -> None:
        """Add the counts of another shape."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def per_thousand(self, count: int) -> float:
        return 1000 * count / max(1, self.statements)

    @property
    def nodes_per_statement(self) -> float:
        return self.nodes / max(1, self.simple)

    @property
    def is_plain(self) -> bool:
        """Return whether no part of the shape is above its aim."""
        return (
            self.per_thousand(self.tuples) <= MOST_TUPLES
            and self.per_thousand(self.conditionals) <= MOST_CONDITIONALS
            and self.per_thousand(self.comprehensions) <= MOST_COMPREHENSIONS
            and self.nodes_per_statement <= MOST_NODES
        )

    def cells(self) -> list[str]:
        return [
            f"{self.statements:,}",
            f"{self.per_thousand(self.tuples):.0f}",
            f"{self.per_thousand(self.conditionals):.0f}",
            f"{self.per_thousand(self.comprehensions):.0f}",
            f"{self.nodes_per_statement:.1f}",
        ]


def is_counted(node: ast.AST) -> bool:
    """Return whether a node is a statement that is neither an import nor a docstring."""
    if not isinstance(node, ast.stmt) or isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return not is_text


def is_tuple_assignment(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def rooms() -> dict[str, Shape]:
    """Return the shape of every room; files beside the rooms are one row."""
    found: dict[str, Shape] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        name = parts[0] if len(parts) > 1 else "files at the top"
        found.setdefault(name, Shape()).add(file.read_text())
    return found


def table() -> str:
    """Return the table of rooms, the package last."""
    package = Shape()
    rows = []
    for name, shape in rooms().items():
        package.join(shape)
        rows.append([name, *shape.cells(), "" if shape.is_plain else "NO"])
    is_light = package.is_plain and package.statements <= MOST_STATEMENTS
    rows.append(["package", *package.cells(), "" if is_light else "NO"])
    aims = (f"{MOST_STATEMENTS:,}", MOST_TUPLES, MOST_CONDITIONALS, MOST_COMPREHENSIONS, MOST_NODES)
    rows.append(["aim", *(str(aim).removesuffix(".0") for aim in aims), ""])
    return shown(("room",), COLUMNS, rows, "Tuples, conditionals and comprehensions per 1,000 statements.")


if __name__ == "__main__":
    print(table())
