"""The recipe's clock, against a walk over the batches as Lightning's loop counts them."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.errors import UserError
from lightning_ga.plan.recipe import Recipe, WindowSpan, is_due

LIMITS = st.just(1.0) | st.integers(1, 12) | st.sampled_from([0.3, 0.5, 0.75])
RECIPES = st.builds(Recipe, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.booleans(), LIMITS)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=4)  # of epochs, over all fits


def batches_of_rank(samples: int, recipe: Recipe) -> list[int]:
    """The samples of each batch that a padded, shared loader yields on one rank, within the Trainer's limit."""
    left = -(-samples // recipe.world_size)
    sizes = []
    while left > 0:
        sizes.append(min(recipe.batch_size, left))
        left -= recipe.batch_size
    if recipe.drop_last and sizes and sizes[-1] < recipe.batch_size:
        sizes.pop()
    limit = recipe.limit if isinstance(recipe.limit, int) else int(len(sizes) * recipe.limit)
    return sizes[:limit]


@dataclass
class StockLoop:
    """Counts as ``training_epoch_loop.py`` does."""

    recipe: Recipe
    every: int  # ``val_check_batch``
    frequency: int
    over_epochs: bool
    total_batch_idx: int = -1
    validated: int = 0
    stepped: int = 0

    def run(self, batches: int) -> list[tuple[int, int, int]]:
        """Run an epoch; return after each window the batches done, and all validations and steps of the schedule."""
        found = []
        for batch_idx in range(batches):
            self.total_batch_idx += 1
            is_last = batch_idx + 1 == batches
            steps = (batch_idx + 1) % self.recipe.factor == 0 or is_last
            if steps and (batch_idx + 1) % self.frequency == 0:
                self.stepped += 1
            current = self.total_batch_idx if self.over_epochs else batch_idx
            if (current + 1) % self.every == 0:
                self.validated += 1
            if steps:
                found.append((batch_idx + 1, self.validated, self.stepped))
        return found


@given(RECIPES, LENGTHS, st.integers(1, 15), st.integers(1, 8), st.booleans())
def test_windows_of_the_recipe_are_lightnings_to_the_batch(recipe, lengths, every, frequency, over_epochs):
    """Validations and steps of schedules, over epochs and fits; those within a window are due at its end, once."""
    stock = StockLoop(recipe, every, frequency, over_epochs)
    earlier = validated = stepped = seen = expected = 0
    for length in lengths:
        if recipe.batches(length) and not batches_of_rank(length, recipe):
            with pytest.raises(UserError, match="leaves none"):
                recipe.epoch(length)
            continue
        epoch = recipe.epoch(length)
        before = 0
        for window, (done, validations, steps) in enumerate(stock.run(epoch.batches), 1):
            samples = min(epoch.samples, window * recipe.effective)
            assert epoch.batches_done(samples) == done
            span = WindowSpan(recipe.factor, before, done, earlier)
            validated += span.validates(every, over_epochs=over_epochs)
            stepped += span.steps_schedule(frequency, is_last=done == epoch.batches)
            before = done
            assert stepped == steps
            expected += validations > seen  # one, however many fell into the window
            seen = validations
            assert validated == expected
        earlier += epoch.batches


@given(RECIPES, st.integers(1, 80))
def test_an_epoch_has_the_batches_of_the_users_own_loader(recipe, samples):
    """``drop_last`` leaves out batches; the Trainer's limit counts them."""
    sizes = batches_of_rank(samples, recipe)
    if recipe.batches(samples) and not sizes:
        return
    epoch = recipe.epoch(samples)
    assert epoch.batches == len(sizes)
    held = sum(sizes) * recipe.world_size
    assert epoch.samples == min(samples, len(sizes) * recipe.batch_size * recipe.world_size)
    assert 0 <= held - epoch.samples < recipe.world_size * recipe.batch_size
    assert epoch.batches_done(0) == 0 or not epoch.samples
    assert epoch.batches_done(epoch.samples) == epoch.batches


@given(RECIPES, st.integers(1, 60), st.integers(1, 60))
def test_a_dataset_that_changes_keeps_the_number_of_batches_of_the_set_up(recipe, first, later):
    """A longer one shows at most as many batches, a shorter one those that it has."""
    if recipe.batches(first) and not batches_of_rank(first, recipe):
        return
    most = recipe.batches_within_limit(first)
    epoch = recipe.epoch(later, most)
    assert epoch.batches == min(most, recipe.batches(later))
    assert epoch.samples <= later


@given(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_what_falls_due_within_a_window_is_due_at_its_end(every, windows):
    """Each multiple is answered by the first window that ends at it or after it."""
    before = 0
    answers = []
    for size in windows:
        if is_due(every, before=before, after=before + size):
            answers.append(before + size)
        before += size
    ends = [sum(windows[: number + 1]) for number in range(len(windows))]
    expected = {min(end for end in ends if end >= multiple) for multiple in range(every, before + 1, every)}
    assert answers == sorted(expected)
