"""Errors of one case: every stack and precision, over several draws of data and weights."""

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.stacks import HELD_IN, UnsupportedError, accelerate, ours, relative_error, stock_lightning, whole_batch

Run = Callable[[int], Tensor]


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
    for name, run in programs(case):
        try:
            measured.errors[name] = [relative_error(run(seed), oracle) for seed, oracle in enumerate(oracles)]
        except UnsupportedError as refusal:
            measured.reasons[name] = str(refusal)
    if case.precision != "true":
        measured.reasons["ours_fp64"] = f"the case is about {case.precision}"
    return measured


def programs(case: Case) -> Iterator[tuple[str, Run]]:
    """Peers in fp64, ours in fp64 and in fp32; where the case is about half precision, all in that."""
    true = case.precision == "true"
    ours_in = HELD_IN.get(case.precision, torch.float32)
    peers = torch.float64 if true else ours_in
    yield "stock_lightning", partial(stock_lightning, case, dtype=peers)
    yield "accelerate", partial(accelerate, case, dtype=peers)
    if true:
        yield "ours_fp64", partial(ours, case, dtype=torch.float64)
    yield "ours", partial(ours, case, dtype=ours_in)
    yield "whole", partial(whole_batch, case, dtype=ours_in, precision=case.precision)


def quiet() -> None:
    """One thread, the same numbers every time; no advice from the trainers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
