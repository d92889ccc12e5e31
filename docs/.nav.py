"""A hook of mkdocs: every page of docs/recipes stands in the navigation, the index first."""

from pathlib import Path
from typing import Any

RECIPES = "recipes/"


def on_config(config: Any) -> Any:
    """Replace the folder in the navigation by its pages."""
    folder = Path(config.docs_dir) / RECIPES
    pages = sorted(path.name for path in folder.glob("*.md") if path.name != "index.md")
    for entry in config.nav:
        for title, place in entry.items():
            if place == RECIPES:
                entry[title] = [RECIPES + name for name in ["index.md", *pages]]
    return config
