"""Is the gradient that of the whole batch? ``python -m benchmarks.fidelity``.

One table: stock Lightning, Hugging Face Accelerate's ``accumulate()`` and ``AutoAccumulate`` on the
same windows, each against a plain loop that takes the whole batch in fp64. All are run, none is
quoted. Exits with 1 if a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.cases import CASES, FP64_TARGET, HALF_TARGETS, LEGEND, WHOLE_TARGET, Case
from benchmarks.output import MET, as_text, conclude, empty_table, error, options
from benchmarks.processes import run_on_ranks, write_as_first_rank
from benchmarks.stacks import HELD_IN, UnsupportedError, accelerate, ours, relative_error, stock_lightning, whole_batch
from benchmarks.trainers import quiet

COLUMNS = {
    "stock_lightning": "Lightning",
    "accelerate": "Accelerate",
    "ours_fp64": "ours fp64",
    "ours": "ours",
    "whole": "whole",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Relative errors to the whole batch in fp64."""

    errors: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def worst(self, program: str) -> float | None:
        return max(self.errors[program]) if program in self.errors else None


def measure(case: Case, draws: int) -> Measured:
    """Run every program on every draw."""
    oracles = [whole_batch(case, seed, torch.float64) for seed in range(draws)]
    measured = Measured()
    for name, run in programs(case).items():
        try:
            measured.errors[name] = [relative_error(run(seed), oracle) for seed, oracle in enumerate(oracles)]
        except UnsupportedError as refusal:
            measured.reasons[name] = str(refusal)
    if case.precision != "true":
        measured.reasons["ours_fp64"] = f"the case is about {case.precision}"
    return measured


def programs(case: Case) -> dict[str, Callable[[int], Tensor]]:
    """Peers in fp64, ours in fp64 and in fp32; where the case is about half precision, all in that."""
    true = case.precision == "true"
    ours_in = HELD_IN.get(case.precision, torch.float32)
    peers = torch.float64 if true else ours_in
    return {
        "stock_lightning": partial(stock_lightning, case, dtype=peers),
        "accelerate": partial(accelerate, case, dtype=peers),
        **({"ours_fp64": partial(ours, case, dtype=torch.float64)} if true else {}),
        "ours": partial(ours, case, dtype=ours_in),
        "whole": partial(whole_batch, case, dtype=ours_in, precision=case.precision),
    }


def targets(case: Case, measured: Measured) -> Iterator[tuple[str, float, float]]:
    """What must hold of ours in one row: a name, the value, and the most that it may be.

    Examples:
        >>> half = Measured({"ours": [1e-3], "whole": [1e-3]})
        >>> list(targets(Case("", precision="bf16-mixed"), half))
        [('ours in bf16-mixed', 0.001, 0.02)]
    """
    if not case.targeted:
        return
    ours, whole = measured.errors["ours"], measured.errors["whole"]
    if case.precision != "true":
        yield f"ours in {case.precision}", max(ours), HALF_TARGETS[case.precision]
        return
    yield "ours in fp64", max(measured.errors["ours_fp64"]), FP64_TARGET
    if case.fp32_target is not None:
        yield "ours in fp32", max(ours), case.fp32_target
    yield "ours ÷ whole batch, both in fp32", max(a / b for a, b in zip(ours, whole)), WHOLE_TARGET


def row(case: Case, measured: Measured) -> dict[str, Any]:
    held = [
        {"what": what, "value": value, "limit": limit, "met": value <= limit}
        for what, value, limit in targets(case, measured)
    ]
    return {
        "case": asdict(case),
        "precision_of_ours_and_whole": "fp32" if case.precision == "true" else case.precision,
        "worst": {name: measured.worst(name) for name in COLUMNS},
        "errors": measured.errors,
        "reasons": measured.reasons,
        "targets": held,
        "met": all(target["met"] for target in held) if held else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = empty_table(("window",), COLUMNS.values())
    shown.add_column("met")
    for one in rows:
        shown.add_row(one["case"]["name"], *(error(one["worst"][name]) for name in COLUMNS), MET[one["met"]])
    return shown


def text(record: Mapping[str, Any]) -> str:
    return as_text(table(record["rows"]), LEGEND.format(draws=record["draws"]))


def measure_on_rank(name: str, draws: str) -> dict[str, Any]:
    """One case on the ranks that ``torchrun`` starts: how both Lightning and Accelerate document it."""
    return asdict(measure(next(case for case in CASES if case.name == name), int(draws)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("fidelity", __doc__)
    parser.add_argument("--draws", type=int, default=10, help="draws of data and weights for each row")
    parser.add_argument("--on-rank", nargs=3, help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    quiet()
    if settings.on_rank:
        *given, written = settings.on_rank
        write_as_first_rank(partial(measure_on_rank, *given), Path(written))
    start, rows, draws = time.perf_counter(), [], settings.draws
    for case in CASES:
        if case.ranks > 1:
            found = Measured(**run_on_ranks(case.ranks, "benchmarks.fidelity", "--on-rank", case.name, draws))
        else:
            found = measure(case, draws)
        rows.append(row(case, found))
    record = {"draws": draws, "seconds": round(time.perf_counter() - start, 1), "rows": rows}
    missed = (
        f"{one['case']['name']}: {target['what']} is {target['value']:.2g}, at most {target['limit']:.2g} was asked."
        for one in rows
        for target in one["targets"]
        if not target["met"]
    )
    return conclude("fidelity", record, text, missed)


if __name__ == "__main__":
    sys.exit(main())
