"""What micro-batches weigh in their window, on random images."""

from functools import partial
from pathlib import Path

import pytest
import torch

from examples.reproduce import mixed_precision as recipe
from examples.reproduce.recipe import Measured


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(64, 1, recipe.SIDE, recipe.SIDE, generator=generator), torch.arange(64) % 10


some = partial(images)


def weighed(name: str) -> Measured:
    return recipe.window(recipe.WINDOWS[name], some, Path())


@pytest.mark.parametrize("name", ["fp32: 16 × 2", "bf16: 16 × 2", "fp16: 16 × 2", "fp32: 4 × 8", "last batch of 4"])
def test_every_micro_batch_weighs_the_same(name: str) -> None:
    found = weighed(name).values
    assert found["spread"] < 1e-7
    assert found["first"] == pytest.approx(1, abs=1e-6)


def test_what_makes_the_last_one_weigh_more() -> None:
    found = weighed("last batch of 4, stock Lightning").values
    assert (found["first"], found["last"]) == (pytest.approx(0.625, rel=1e-5), pytest.approx(2.5, rel=1e-5))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_skipped_micro_batch_halves_the_other() -> None:
    assert weighed("first batch skipped, stock Lightning").values["last"] == pytest.approx(0.5, rel=1e-5)
    assert weighed("first batch skipped").values["last"] == pytest.approx(1, rel=1e-5)


def test_batch_norm_weighs_gradients_alike_and_its_running_mean_not() -> None:
    found = weighed("BatchNorm: 16 × 2").values
    assert found["spread"] < 1e-6
    assert found["error"] > 0.01
    running = recipe.running_mean(some, Path()).values
    assert running["last"] / running["first"] == pytest.approx(0.9**-7, rel=1e-3)
