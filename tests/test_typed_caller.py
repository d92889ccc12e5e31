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
from lightning_ga import (
    AccumulationPlan,
    AutoAccumulate,
    ProbeResult,
    Trial,
    UserError,
    find_micro_batch,
    is_out_of_memory,
    plan_accumulation,
)
from lightning_ga.testing import limit_memory
from lightning_ga.weights import TargetTokens


def doubled(epoch: int) -> int:
    return 32 << epoch


def test_a_plan_has_types() -> None:
    """Its parts are what the words say, and it is frozen."""
    plan = plan_accumulation(256, micro_batch=48, world_size=2)
    assert_type(plan, AccumulationPlan)
    assert_type(plan.chunks, tuple[tuple[int, ...], ...])
    assert plan.factor + plan.micro_batch_size + plan.effective_batch_size + plan.world_size == 3 + 43 + 256 + 2
    with pytest.raises(TypeError):
        plan_accumulation(256, 48)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        plan.factor = 4  # type: ignore[misc]
    with pytest.raises(UserError):
        plan_accumulation("256", micro_batch=48)  # type: ignore[arg-type]


def test_public_modules_need_no_import_of_their_own() -> None:
    assert_type(lightning_ga.weights.TargetTokens(), TargetTokens)
    assert_type(lightning_ga.models.to_group_norm(torch.nn.BatchNorm2d(4)), torch.nn.Module)


def test_the_callback_takes_numbers_mappings_and_callables() -> None:
    """Each where the signature says so; a word that is no choice is an error before anything runs."""
    mapping: Mapping[int, int] = {0: 32, 5: 64}
    effective: list[int | Mapping[int, int] | Callable[[int], int] | None] = [None, 32, mapping, doubled]
    callbacks = [AutoAccumulate(value) for value in effective]
    callbacks += [AutoAccumulate(accumulate=value, micro_batch_size=8) for value in effective]
    callbacks.append(AutoAccumulate("65536 tokens"))
    callbacks += [AutoAccumulate(memory_budget=value) for value in (None, 0.5, 2**30, "10GiB")]
    callback = AutoAccumulate(micro_batch_size="auto", max_micro_batch_size=64, normalize=None, verify=False)
    assert_type(callback.plan, AccumulationPlan | None)
    assert_type(callback.probe, ProbeResult | None)
    assert callback.plan is None
    assert callback.probe is None
    assert len(callbacks) == 13
    with pytest.raises(UserError):
        AutoAccumulate(objective="speed")  # type: ignore[arg-type]
    with pytest.raises(UserError):
        AutoAccumulate(micro_batch_size="large")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        AutoAccumulate(effective_batch=32)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        AutoAccumulate(32, 4)  # type: ignore[call-arg]


def test_a_search_in_a_plain_loop_has_types() -> None:
    """The step takes a number of samples; the result says what was found and how."""
    weight = torch.zeros(4, requires_grad=True)

    def step(samples: int) -> None:
        weight.grad = None
        (torch.ones(samples, 4) * weight).sum().backward()

    result = find_micro_batch(step, high=4, budget="1MiB", device="cpu")
    assert_type(result, ProbeResult)
    assert_type(result.trials, tuple[Trial, ...])
    assert_type(result.method, Literal["replay", "prediction", "below", "phases", "bracket"])
    assert_type(result.source, Literal["probe", "cache", "checkpoint", "estimate"])
    assert result.limit == 4
    with pytest.raises(UserError):
        find_micro_batch(step, high="4")  # type: ignore[arg-type]


def test_running_out_of_memory_has_types() -> None:
    assert_type(is_out_of_memory(ValueError()), bool)
    with limit_memory("1KiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(2**20)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(UserError("no"))


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
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path), "--no-error-summary", __file__],
        capture_output=True,
        text=True,
        cwd=Path(lightning_ga.__file__).parents[1],
    )
    assert (checked.stdout, checked.returncode) == ("", 0), checked.stdout + checked.stderr
