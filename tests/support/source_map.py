"""Where is each file of the package tested? ``python tests/support/source_map.py`` prints the map.

A file is tested by the test file that mirrors it (``tests/plan/test_windows.py`` for ``plan/windows.py``), or the last
line of its docstring names the test files that hold it: ``Tested in tests/integration/test_survive.py.``
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_ga"
NAMED = re.compile(r"^Tested in (.+)\.$")


def sources() -> list[Path]:
    """Return the files of the package, ``__init__.py`` left out, relative to it."""
    files = (file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))
    return sorted(file for file in files if file.name != "__init__.py")


def mirror(source: Path) -> Path:
    """Return the test file that mirrors a source file, relative to the repository."""
    return Path("tests") / source.parent / f"test_{source.name}"


def named_tests(source: Path) -> list[Path]:
    """Return the test files that the last line of a source file's docstring names."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / source).read_text())) or ""
    last = docstring.rstrip().rpartition("\n")[2]
    found = NAMED.match(last)
    if found is None:
        return []
    return [Path(name) for name in found[1].split(" and ")]


def files_that_test(source: Path) -> list[Path]:
    """Return the test files of a source file that exist."""
    wanted = [mirror(source), *named_tests(source)]
    return [test for test in wanted if (ROOT / test).is_file()]


if __name__ == "__main__":
    for source in sources():
        print(f"{source!s:32} {', '.join(str(test) for test in files_that_test(source)) or 'NO TEST'}")
