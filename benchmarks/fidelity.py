"""Is the gradient that of the whole batch? ``python -m benchmarks.fidelity``.

Stock Lightning, Hugging Face Accelerate's ``accumulate()`` and ``AutoAccumulate`` on the same windows, each against a
plain loop that takes the whole batch in fp64. All are run, none is quoted.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.output import MET, Record, benchmark, error, shown
from benchmarks.processes import apart
from benchmarks.stacks import CASES, HELD_IN, Case, UnsupportedError, accelerate, ours, stock_lightning, whole_batch
from benchmarks.trainers import relative_error

FP64_TARGET = 1e-12
WHOLE_TARGET = 2.0  # times the whole batch's own error
HALF_TARGETS = {"bf16-mixed": 2e-2, "16-mixed": 2e-3, "bf16-true": 1e-2}
LEGEND = """\
Relative error of the gradient that the optimizer sees to the whole batch's in
fp64, the worst of {draws} draws. Lightning, Accelerate and "ours fp64" compute in
fp64; "ours" and "whole" (one batch, no accumulation) in fp32. In the rows bf16
and fp16 all compute in that; in bf16-true the weights are bf16, in fp64 too.
ᵃ 43+43+42. ᵇ The same; the change of the parameters in one step of several
closure calls. BatchNorm, which no accumulation can get right, has no target."""
TITLES = ("Lightning", "Accelerate", "ours fp64", "ours", "whole")
COLUMNS = ("stock_lightning", "accelerate", "ours_fp64", "ours", "whole")


@dataclass(frozen=True, slots=True)
class Measured:  # relative errors to the whole batch in fp64
    errors: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def measured(case: Case, draws: int) -> Measured:
    oracles = [whole_batch(case, seed, torch.float64) for seed in range(draws)]
    found = Measured()
    for name, run in programs(case).items():
        try:
            found.errors[name] = [relative_error(run(seed), oracle) for seed, oracle in enumerate(oracles)]
        except UnsupportedError as refusal:
            found.reasons[name] = str(refusal)
    if case.precision != "true":
        found.reasons["ours_fp64"] = f"the case is about {case.precision}"
    return found


def on_rank(name: str, draws: int) -> dict[str, Any]:
    """One case on the ranks that ``torchrun`` starts: how both Lightning and Accelerate document it."""
    return asdict(measured(next(case for case in CASES if case.name == name), draws))


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


def targets(case: Case, found: Measured) -> Iterator[tuple[str, float, float]]:
    """What must hold of ours in one row: a name, the value, and the most that it may be.

    Examples:
        >>> half = Measured({"ours": [1e-3], "whole": [1e-3]})
        >>> list(targets(Case("", precision="bf16-mixed"), half))
        [('ours in bf16-mixed', 0.001, 0.02)]
    """
    if not case.targeted:
        return
    ours, whole = found.errors["ours"], found.errors["whole"]
    if case.precision != "true":
        yield f"ours in {case.precision}", max(ours), HALF_TARGETS[case.precision]
        return
    yield "ours in fp64", max(found.errors["ours_fp64"]), FP64_TARGET
    if case.fp32_target is not None:
        yield "ours in fp32", max(ours), case.fp32_target
    yield "ours ÷ whole batch, both in fp32", max(a / b for a, b in zip(ours, whole)), WHOLE_TARGET


def row(case: Case, draws: int) -> dict[str, Any]:
    ranks = case.ranks
    found = Measured(**apart(on_rank, case.name, draws, ranks=ranks)) if ranks > 1 else measured(case, draws)
    held = [{"what": w, "value": v, "limit": most, "met": v <= most} for w, v, most in targets(case, found)]
    return {
        "case": asdict(case),
        "worst": {name: max(found.errors[name]) if name in found.errors else None for name in COLUMNS},
        "errors": found.errors,
        "reasons": found.reasons,
        "targets": held,
        "met": all(target["met"] for target in held) if held else None,
    }


def text(record: Record) -> str:
    rows = (
        (one["case"]["name"], *(error(one["worst"][name]) for name in COLUMNS), MET[one["met"]])
        for one in record["rows"]
    )
    return shown(("window",), (*TITLES, "met"), rows, LEGEND.format(draws=record["draws"]))


def measure(draws: int = 10) -> dict[str, Any]:
    rows = [row(case, draws) for case in CASES]
    missed = [
        f"{one['case']['name']}: {target['what']} is {target['value']:.2g}, at most {target['limit']:.2g} was asked."
        for one in rows
        for target in one["targets"]
        if not target["met"]
    ]
    return {"draws": draws, "rows": rows, "missed": missed}


main = benchmark("fidelity", __doc__, measure, text, quick={"draws": 1})

if __name__ == "__main__":
    raise SystemExit(main())
