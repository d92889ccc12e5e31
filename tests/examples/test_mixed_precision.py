"""What micro-batches weigh in their window, on random images."""

from pathlib import Path

import pytest
import torch

from examples.reproduce import mixed_precision as recipe
from examples.reproduce.recipe import Measured


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(64, 1, recipe.SIDE, recipe.SIDE, generator=generator), torch.arange(64) % 10


def weighed(name: str) -> Measured:
    return recipe.window(recipe.WINDOWS[name], images, Path())


@pytest.mark.parametrize("name", ["fp32: 16 × 2", "bf16: 16 × 2", "fp16: 16 × 2", "fp32: 4 × 8", "last batch of 4"])
def test_every_micro_batch_weighs_the_same(name: str) -> None:
    found = weighed(name).values
    assert found["spread"] < 1e-7
    assert found["first"] == pytest.approx(1, abs=1e-6)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("last batch of 4, stock Lightning", {"first": 0.625, "last": 2.5}),
        ("first batch skipped, stock Lightning", {"last": 0.5}),
        ("first batch skipped", {"last": 1}),
    ],
)
def test_what_makes_micro_batches_weigh_more_or_less(name: str, expected: dict[str, float]) -> None:
    found = weighed(name).values
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_batch_norm_weighs_gradients_alike_and_its_running_mean_not() -> None:
    found = weighed("BatchNorm: 16 × 2").values
    assert found["spread"] < 1e-6
    assert found["error"] > 0.01
    running = recipe.running_mean(images, Path()).values
    assert running["last"] / running["first"] == pytest.approx(0.9**-7, rel=1e-3)
