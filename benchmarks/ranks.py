"""One case on the ranks that ``torchrun`` starts: how both Lightning and Accelerate document it."""

import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.measure import Measured, measure, quiet
from benchmarks.torchrun import run_on_ranks, write_as_first_rank


def measure_on_ranks(case: Case, draws: int) -> Measured:
    """Run this file on as many ranks as the case asks for."""
    return Measured(**run_on_ranks(case.ranks, "benchmarks.ranks", case.name, draws))


def main(name: str, draws: str, written: str) -> None:
    """Measure on this rank; the first writes down what came out."""
    quiet()
    case = next(case for case in CASES if case.name == name)

    def found() -> dict[str, Any]:
        measured = measure(case, int(draws))
        return {"errors": measured.errors, "reasons": measured.reasons}

    write_as_first_rank(found, Path(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
