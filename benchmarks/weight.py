"""How heavy is the repository beside its aims? ``python -m benchmarks.weight``, or ``make weight``.

Lines of Python by room, and words of the documentation. NO marks a row above 105 % of its aim.
"""

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

from benchmarks.output import shown

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_ga"
AIMS = {"plan": 1700, "batch": 700, "memory": 1600, "snapshot": 650, "loading": 1250, "compat": 1150, "probe": 2300}
AIMS |= {"fit": 2400, "app, train.py, report.py": 1600, "models, data": 1250}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python(*places: Path) -> list[Path]:
    return [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def code_lines(text: str) -> int:
    """Count lines that hold code.

    Examples:
        >>> code_lines('def f():\\n    \\"\\"\\"Text.\\"\\"\\"\\n\\n    # why\\n    return (1 +\\n        2)\\n')
        3
    """
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {row for t in tokens if t.type not in LAYOUT for row in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(found)


def weights() -> list[tuple[str, int, int]]:
    """Return the name, the weight now, and the aim of every row."""
    rooms = {name: python(*(PACKAGE / part for part in name.split(", "))) for name in AIMS}
    files = python(PACKAGE)
    rest = {*files} - {file for room in rooms.values() for file in room}
    rows = [(name, lines(room), AIMS[name]) for name, room in rooms.items()]
    code = sum(code_lines(file.read_text()) for file in files)
    rows += [("other files at the top", lines(rest), 950), ("package", lines(files), 15500), ("  code", code, 10700)]
    aims = {"tests": 17000, "tests/support": 2200, "tests/differential": 1000, "benchmarks": 3200}
    rows += [(name, lines(python(ROOT / name)), aim) for name, aim in aims.items()]
    words = sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md"))
    return [*rows, ("docs, words", words, 13000)]


if __name__ == "__main__":
    cells = ((name, f"{now:,}", f"{aim:,}", "NO" if now > 1.05 * aim else "") for name, now, aim in weights())
    print(shown(("room",), ("now", "aim", ""), cells))
