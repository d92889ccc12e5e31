"""Is the gradient that of the whole batch? ``python -m benchmarks.fidelity``.

One table: stock Lightning, Hugging Face Accelerate's ``accumulate()`` and ``AutoAccumulate`` on the
same windows, each against a plain loop that takes the whole batch in fp64. All are run, none is
quoted. Exits with 1 if a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.cases import CASES, FP64_TARGET, HALF_TARGETS, LEGEND, WHOLE_TARGET, Case
from benchmarks.measure import Measured, measure, quiet
from benchmarks.output import MET, as_text, empty_table, error, write_json
from benchmarks.ranks import measure_on_ranks

COLUMNS = {
    "stock_lightning": "Lightning",
    "accelerate": "Accelerate",
    "ours_fp64": "ours fp64",
    "ours": "ours",
    "whole": "whole",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What must hold of ours."""

    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def targets(case: Case, measured: Measured) -> Iterator[Target]:
    """The targets of one row.

    Examples:
        >>> half = Measured({"ours": [1e-3], "whole": [1e-3]})
        >>> [target.what for target in targets(Case("", precision="bf16-mixed"), half)]
        ['ours in bf16-mixed']
    """
    if not case.targeted:
        return
    ours, whole = measured.errors["ours"], measured.errors["whole"]
    if case.precision != "true":
        yield Target(f"ours in {case.precision}", max(ours), HALF_TARGETS[case.precision])
        return
    yield Target("ours in fp64", max(measured.errors["ours_fp64"]), FP64_TARGET)
    if case.fp32_target is not None:
        yield Target("ours in fp32", max(ours), case.fp32_target)
    yield Target("ours ÷ whole batch, both in fp32", max(a / b for a, b in zip(ours, whole)), WHOLE_TARGET)


def row(case: Case, measured: Measured) -> dict[str, Any]:
    held = list(targets(case, measured))
    return {
        "case": asdict(case),
        "precision_of_ours_and_whole": "fp32" if case.precision == "true" else case.precision,
        "worst": {name: measured.worst(name) for name in COLUMNS},
        "errors": measured.errors,
        "reasons": measured.reasons,
        "targets": [{**asdict(target), "met": target.met} for target in held],
        "met": all(target.met for target in held) if held else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = empty_table(("window",), COLUMNS.values())
    shown.add_column("met")
    for one in rows:
        shown.add_row(one["case"]["name"], *(error(one["worst"][name]) for name in COLUMNS), MET[one["met"]])
    return shown


def text(record: Mapping[str, Any]) -> str:
    return as_text(table(record["rows"]), LEGEND.format(draws=record["draws"]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--draws", type=int, default=10, help="draws of data and weights for each row (default: 10)")
    draws = parser.parse_args(arguments).draws
    quiet()
    start = time.perf_counter()
    rows = [row(case, measure_on_ranks(case, draws) if case.ranks > 1 else measure(case, draws)) for case in CASES]
    record = {"draws": draws, "seconds": round(time.perf_counter() - start, 1), "rows": rows}
    print(f"{text(record)}\n{write_json('fidelity', record).name}, {record['seconds']} s")
    missed = [(one["case"]["name"], target) for one in rows for target in one["targets"] if not target["met"]]
    for name, target in missed:
        print(f"MISSED {name}: {target['what']} is {target['value']:.2g}, at most {target['limit']:.2g} was asked.")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
