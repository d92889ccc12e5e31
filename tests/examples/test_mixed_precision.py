"""What micro-batches weigh in their window, on random images."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # examples are not installed

from examples.reproduce import mixed_precision as recipe  # noqa: E402
from examples.reproduce.recipe import Measured  # noqa: E402


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(64, 1, recipe.SIDE, recipe.SIDE, generator=generator), torch.arange(64) % 10


some = partial(images)


def weighed(name: str) -> Measured:
    return recipe.window(recipe.WINDOWS[name], some, Path())


@pytest.mark.parametrize("name", ["fp32: 16 × 2", "bf16: 16 × 2", "fp16: 16 × 2", "fp32: 4 × 8", "last batch of 4"])
def test_every_micro_batch_weighs_the_same(name: str) -> None:
    """The last one too, in any precision, and where it is smaller."""
    found = weighed(name).values
    assert found["spread"] < 1e-7
    assert found["first"] == pytest.approx(1, abs=1e-6)


def test_what_makes_the_last_one_weigh_more() -> None:
    """A smaller last batch in stock Lightning: its samples weigh four times as much as the others."""
    found = weighed("last batch of 4, stock Lightning").values
    assert (found["first"], found["last"]) == (pytest.approx(0.625, rel=1e-5), pytest.approx(2.5, rel=1e-5))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_skipped_micro_batch_halves_the_other() -> None:
    """In stock Lightning; weighted by samples, the other is the whole window."""
    assert weighed("first batch skipped, stock Lightning").values["last"] == pytest.approx(0.5, rel=1e-5)
    assert weighed("first batch skipped").values["last"] == pytest.approx(1, rel=1e-5)


def test_a_step_that_overflows_is_skipped_whole() -> None:
    """No part of the window counts."""
    found = weighed("fp16: overflow, the step is skipped").values
    assert (found["first"], found["last"]) == (0, 0)


def test_unscaling_in_each_micro_batch_leaves_the_last_one_alone() -> None:
    """The first one is divided by the scale twice."""
    found = recipe.unscaled_each_time(some, Path()).values
    assert found["first"] == pytest.approx(1 / recipe.SCALE, rel=1e-2)
    assert found["last"] == pytest.approx(1, rel=1e-3)


def test_batch_norm_weighs_gradients_alike_and_its_running_mean_not() -> None:
    """Each micro-batch has its own statistics; the running mean forgets a tenth of the earlier ones each time."""
    found = weighed("BatchNorm: 16 × 2").values
    assert found["spread"] < 1e-6
    assert found["error"] > 0.01
    running = recipe.running_mean(some, Path()).values
    assert running["last"] / running["first"] == pytest.approx(0.9**-7, rel=1e-3)
