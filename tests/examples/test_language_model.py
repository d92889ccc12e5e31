"""What the recipe shows, on a tiny model."""

from collections.abc import Iterator

import pytest
import torch

from examples.reproduce import language_model as recipe
from examples.reproduce.command_line import built
from examples.reproduce.gradients import flat_gradient, relative_error
from lightning_ga.data.sets import pad

TINY = ["experiment=definitions_gpt", "model.width=16", "model.depth=1", "model.heads=2"]


@pytest.fixture(scope="module")
def whole() -> Iterator[list[torch.Tensor]]:
    """One full window of 32 texts and one of 12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "COMPARED", 1)
        yield recipe.gradients(TINY, (recipe.WINDOW, recipe.BY_TOKENS))


@pytest.mark.parametrize(("micro_batch", "kind"), [(8, recipe.BY_TOKENS), (2, recipe.BY_LENGTH)])
def test_token_weights_give_the_gradient_of_whole_windows(micro_batch, kind, whole):
    found = recipe.gradients(TINY, (micro_batch, kind))
    assert len(found) == len(whole) == 2
    assert max(map(relative_error, found, whole)) < 1e-6


def test_a_mean_of_means_is_what_is_written_by_hand(whole: list[torch.Tensor]) -> None:
    """``loss / 4`` in each micro-batch: percents off in a full window, half lost in one of two micro-batches."""
    found = recipe.gradients(TINY, (8, recipe.NAIVE))
    errors = list(map(relative_error, found, whole))
    assert errors[0] > 0.01
    assert errors[1] > 0.4
    fit = built(TINY)
    texts = fit.data.train_dataloader().dataset
    for start in range(0, recipe.WINDOW, 8):
        (fit.module.token_loss(pad([texts[place] for place in range(start, start + 8)])) / 4).backward()
    assert relative_error(found[0], flat_gradient(fit.module)) < 1e-5
