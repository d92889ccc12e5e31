"""Trainings on data of other libraries end as stock Lightning's; by hand, in an environment that has them.

No test environment has them all: each is skipped with its name where it is missing.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from benchmarks.data_libraries import LIBRARIES, MOST, WAYS, row


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # other libraries warn of themselves
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_training_ends_as_stock_lightnings(library: str, tmp_path: Path) -> None:
    """In the default mode, in the step, with an error and a resume."""
    package = LIBRARIES[library][0]
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"needs {package}, which no environment of the tests has: see benchmarks/data_libraries.py")
    found = row(library, tmp_path)["differences"]
    assert found.keys() == set(WAYS)
    assert all(isinstance(value, float) and value <= MOST for value in found.values()), found
