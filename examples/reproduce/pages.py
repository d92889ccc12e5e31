"""Write tables and pictures of the records into the pages: ``python -m examples.reproduce.pages``.

A table stands in ``docs/recipes/NAME.md`` between ``<!-- recipe: NAME -->`` and ``<!-- end -->``; it is that of the
largest scale in ``examples/results``. The picture is ``docs/images/recipes/NAME.png``.
"""

import re
import sys
from pathlib import Path

from examples.reproduce.__main__ import NAMES, load
from examples.reproduce.recipe import SCALES, Recipe, Result, read_result
from examples.reproduce.tables import markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "examples" / "results"
PAGES, PICTURES = ROOT / "docs" / "recipes", ROOT / "docs" / "images" / "recipes"
_PLACE = re.compile(r"(<!-- recipe: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def largest(recipe: Recipe) -> Result | None:
    """Find a recipe's record of the largest scale."""
    records = (read_result(RESULTS / scale / f"{recipe.NAME}.json") for scale in reversed(SCALES))
    return next((record for record in records if record is not None), None)


def filled(page: str) -> str:
    """Fill the places of a page with the tables of the records."""

    def fill(place: re.Match[str]) -> str:
        recipe = load(place[2])
        result = largest(recipe)
        return place[0] if result is None else f"{place[1]}\n{markdown(recipe, result)}\n\n{place[3]}"

    return _PLACE.sub(fill, page)


def main() -> int:
    """Rewrite the pages that there are, and draw their pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        page, recipe = PAGES / f"{name}.md", load(name)
        result = largest(recipe)
        if page.is_file() and result is not None:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
            recipe.draw(result).savefig(PICTURES / f"{name}.png", dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
