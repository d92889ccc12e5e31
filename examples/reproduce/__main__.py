"""Run classic recipes of gradient accumulation, and print what was measured.

A killed run resumes: what has been measured with the same settings, versions and machine is
not run again.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from examples.reproduce.recipe import Recipe, Scale, Setup, as_recipe
from examples.reproduce.run import reproduce
from examples.reproduce.tables import overview

NAMES = (
    *("cifar10_resnet34d", "mnist_mlp", "custom_loop"),
    *("language_model", "contrastive"),
    *("batch_growth", "how_large"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipes that are named, or all."""
    options = parser().parse_args(arguments)
    quiet()
    os.environ["LIGHTNING_GA_DATA"] = options.data
    scale: Scale = "quick" if options.quick else "medium" if options.medium else "full"
    setup = Setup(scale, options.data)
    console = Console()
    recipes = [load(name) for name in options.names or NAMES]
    results = [
        (recipe, reproduce(recipe, setup, options.results, again=options.again, tell=console.print))
        for recipe in recipes
    ]
    console.print(overview(results))
    console.print(f"Records: {options.results / scale}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    described = argparse.ArgumentParser(prog="python -m examples.reproduce", description=__doc__)
    described.add_argument(
        "names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=f"all, or: {', '.join(NAMES)}"
    )
    size = described.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="all small: minutes on two cores")
    size.add_argument("--medium", action="store_true", help="as large as the tables of the pages: an hour on two cores")
    described.add_argument(
        "--data",
        default=os.environ.get("LIGHTNING_GA_DATA", "data"),
        help="folder in which data sets are looked for (default: %(default)s); digits need none",
    )
    described.add_argument(
        "--results", type=Path, default=Path("outputs/reproduce"), help="folder of the records (default: %(default)s)"
    )
    described.add_argument("--again", action="store_true", help="measure again what has been measured")
    return described


def load(name: str) -> Recipe:
    """Import a recipe by its name."""
    return as_recipe(import_module(f"examples.reproduce.{name}"))


def quiet() -> None:
    """Leave out advice on speed, which a small run on purpose does not follow."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
