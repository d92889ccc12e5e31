"""Runs of the command line that several tests read."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def _runs() -> dict[tuple[str, ...], Any]:
    return {}


@pytest.fixture
def shared(
    command: Callable[..., Any], _runs: dict[tuple[str, ...], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Type a command line that other tests type too: it is run once, and its folder copied to where it would be."""

    def run(*arguments: str, folder: str = "run") -> Any:
        if arguments not in _runs:
            first = command(*arguments, folder=folder)
            kept = tmp_path_factory.mktemp("shared") / "run"
            shutil.move(first.folder, kept)
            _runs[arguments] = replace(first, folder=kept)
        copy = Path.cwd() / "outputs" / folder
        shutil.copytree(_runs[arguments].folder, copy)
        return replace(_runs[arguments], folder=copy)

    return run
