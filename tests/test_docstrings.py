"""The examples in docstrings say what happens."""

import doctest
import importlib
import logging
import pkgutil

import pytest

import lightning_ga

MODULES = [module.name for module in pkgutil.walk_packages(lightning_ga.__path__, "lightning_ga.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is run and its output compared, without what a command line's log would print."""
    monkeypatch.setattr(logging.root, "handlers", [])
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


def test_there_are_examples() -> None:
    """Not none by mistake."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(len(found.examples) for module in modules for found in finder.find(module)) > 30
