"""Put the tables of ``benchmarks/results`` into the documentation: ``python -m benchmarks.quote``.

A table stands between ``<!-- benchmark: NAME -->`` and ``<!-- end -->``.
"""

import re
from importlib import import_module
from pathlib import Path

from benchmarks.output import read_json

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (*sorted((DOCS / "results").glob("*.md")), DOCS / "guide" / "frameworks.md", DOCS / "guide" / "data.md")
_PLACE = re.compile(r"(<!-- benchmark: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def quoted(page: str) -> str:
    """The page with its tables as the last run of each benchmark wrote them."""

    def fill(place: re.Match[str]) -> str:
        name = place[2]
        return f"{place[1]}```text\n{import_module(f'benchmarks.{name}').text(read_json(name))}\n```\n{place[3]}"

    return _PLACE.sub(fill, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(quoted(page.read_text()))
