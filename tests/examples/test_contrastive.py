"""What the recipe shows, in one epoch."""

from pathlib import Path

import pytest

from examples.reproduce import contrastive as recipe


@pytest.mark.slow
def test_chunks_give_the_gradient_of_the_whole_batch_in_the_budget() -> None:
    """Accumulation within the same budget gives another one."""
    whole, chunks, means = (
        recipe.measure(name, 1, Path()).values for name in (recipe.WHOLE, recipe.CHUNKS, recipe.MEANS)
    )
    assert whole["error"] == 0
    assert chunks["error"] < 1e-5
    assert means["error"] > 0.1
    assert max(chunks["peak"], means["peak"]) < whole["peak"] / 10
    assert chunks["loss"] == pytest.approx(whole["loss"], rel=1e-5)
