"""The public names as a caller sees them who checks types.

``mypy --strict`` reads this file: what is right must pass, and where an ignore stands an error must
be, as strictness includes ``warn_unused_ignores``. What is right is run as well.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, assert_type

import pytest
import torch

import lightning_ga
from lightning_ga import AccumulationPlan, AutoAccumulate, ProbeResult, Trial, UserError, find_micro_batch
from lightning_ga.counters import TargetTokens
from lightning_ga.testing import limit_memory


def test_public_names_have_types() -> None:
    """Public modules need no import of their own; numbers, mappings and callables go where signatures say so."""
    assert_type(lightning_ga.counters.TargetTokens(), TargetTokens)
    plan = lightning_ga.plan_accumulation(256, micro_batch=48, world_size=2)
    assert_type(plan, AccumulationPlan)
    assert_type(plan.chunks, tuple[tuple[int, ...], ...])
    with pytest.raises(AttributeError):
        plan.factor = 4  # type: ignore[misc]
    effective: list[int | Mapping[int, int] | Callable[[int], int] | None] = [None, 32, {0: 32}, lambda epoch: 32]
    for value in effective:
        AutoAccumulate(value)
        AutoAccumulate(accumulate=value, micro_batch_size=8)
    for budget in (None, 0.5, 2**30, "10GiB"):
        AutoAccumulate(memory_budget=budget)
    callback = AutoAccumulate(micro_batch_size="auto", max_micro_batch_size=64, normalize=None, verify=False)
    assert assert_type(callback.plan, AccumulationPlan | None) is None
    assert assert_type(callback.probe, ProbeResult | None) is None
    with pytest.raises(UserError):
        AutoAccumulate(objective="speed")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        AutoAccumulate(32, 4)  # type: ignore[call-arg]


def test_a_search_in_a_plain_loop_has_types() -> None:
    """The step takes a number of samples; the result says what was found and how."""
    result = find_micro_batch(lambda samples: torch.zeros(samples), high=4, budget="1MiB", device="cpu")
    assert_type(result, ProbeResult)
    assert_type(result.trials, tuple[Trial, ...])
    assert_type(result.method, Literal["replay", "prediction", "below", "phases", "bracket"])
    assert result.limit == 4
    with limit_memory("1KiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(2**20)
    assert assert_type(lightning_ga.is_out_of_memory(caught.value), bool)


def test_a_caller_who_checks_types_finds_no_error(tmp_path: Path) -> None:
    """Neither in what is right here nor by a missing error in what is wrong."""
    # Only the caller's errors count, and types of torch and Lightning, slow to read, are not needed for them.
    options = [
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        "--no-site-packages",
        "--ignore-missing-imports",
    ]
    line = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path), "--no-error-summary", __file__]
    folder = Path(lightning_ga.__file__).parents[1]
    checked = subprocess.run(line, capture_output=True, text=True, cwd=folder)
    assert (checked.stdout, checked.returncode) == ("", 0), checked.stdout + checked.stderr
