"""What a recipe's batches weigh and count in rare shapes: no loss for a piece, empty batches, a second fit, errors."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import Regression, Samples, fit, plain_loop, worst_error
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_ga import AutoAccumulate
from lightning_ga.schedule import by_samples

SIZE = 16


def gradient_of(indices: list[int], size: int) -> torch.Tensor:
    """The gradient of the mean over some of so many samples, at the first weights."""
    return plain_loop(Samples(size), [indices])[0]


# --- a piece without a loss ------------------------------------------------------------------------


class SkipsSecondPiece(Regression):
    """Has no loss for the samples 4 to 7."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        return None if batch[2].tolist() == [4, 5, 6, 7] else found


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("normalize", ["samples", None])
@pytest.mark.parametrize("factor", [1, 2])
def test_a_piece_without_a_loss(normalize: Any, factor: int) -> None:
    """It is left out of the mean; with ``normalize=None``, divisors are stock Lightning's, as the warning says."""
    module = SkipsSecondPiece()
    callback = AutoAccumulate(micro_batch_size=4, micro_batching="step", normalize=normalize, verify=False)
    data = DataLoader(Samples(8 * factor), 8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(data, callback, module=module, accumulate_grad_batches=factor, max_epochs=1)
    pieces = [[*range(4)]] if factor == 1 else [[*range(4)], [*range(8, 12)], [*range(12, 16)]]
    number = len(pieces) if normalize == "samples" else 2 * factor
    expected = sum(gradient_of(piece, 8 * factor) for piece in pieces) / number
    assert worst_error(module.gradients, [expected]) <= 1e-12
    (text,) = [str(each.message) for each in told if "returned None for some micro-batches" in str(each.message)]
    assert ("the mean over those with a loss" in text) is (normalize == "samples")
    assert ("divided as if all had one" in text) is (normalize is None)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("normalize", ["samples", None])
def test_a_micro_batch_without_a_loss(normalize: Any, mode: str) -> None:
    """The same, where the loader's batches are micro-batches."""
    module = SkipsSecondPiece()
    callback = AutoAccumulate(micro_batching=mode, micro_batch_size=4, normalize=normalize, verify=False)
    with pytest.warns(UserWarning, match="returned None for some micro-batches") as told:
        fit(DataLoader(Samples(8), 4), callback, module=module, accumulate_grad_batches=2, max_epochs=1)
    divisor = 1 if normalize == "samples" else 2
    assert worst_error(module.gradients, [gradient_of(range(4), 8) / divisor]) <= 1e-12
    (text,) = [str(each.message) for each in told if "returned None for some micro-batches" in str(each.message)]
    assert ("divided as if all had one" in text) is (normalize is None)


# --- empty batches ---------------------------------------------------------------------------------


class WithEmpty(IterableDataset[Any]):
    """Ready-made batches, of which the second is empty."""

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(SIZE)
        for indices in ([0, 1, 2, 3], [], [4, 5, 6, 7, 8, 9], [10, 11]):
            rows = default_collate([samples[index] for index in (indices or [0])])
            yield rows if indices else [row[:0] for row in rows]


class SumOfNone(Regression):
    """The loss of an empty batch is 0, as losses over boxes are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if len(batch[0]) else 0 * self.net(batch[0]).sum()


@pytest.mark.parametrize("kind", [Regression, SumOfNone])
def test_an_empty_batch_weighs_nothing_in_its_window(kind: Any) -> None:
    module = kind()
    data = DataLoader(WithEmpty(), batch_size=None)
    callback = AutoAccumulate(micro_batch_size=3, verify=False)
    fit(data, callback, module=module, accumulate_grad_batches=2, max_epochs=1)
    windows = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert worst_error(module.gradients, plain_loop(Samples(SIZE), windows)) <= 1e-12


def test_an_empty_batch_alone_is_stock_lightnings() -> None:
    """Its gradient is that of whatever loss the step returns."""
    ours, stock = SumOfNone(), SumOfNone()
    for module, callbacks in ((stock, []), (ours, [AutoAccumulate(micro_batch_size=8, verify=False)])):
        fit(DataLoader(WithEmpty(), batch_size=None), *callbacks, module=module, max_epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(ours.gradients, stock.gradients, strict=True))


class Encoded(Regression):
    """A loss of its own on top of an encoder that runs in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.net[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net[2](self.net[1](self.encoder(batch[0])))
        return torch.nn.functional.mse_loss(outputs, batch[1]) if len(outputs) else 0 * outputs.sum()


@pytest.mark.filterwarnings("ignore:Accumulation was not measured")
def test_an_empty_batch_has_no_chunks() -> None:
    ours, stock = Encoded(), Encoded()
    accumulate = AutoAccumulate(whole="encoder", micro_batch_size=2, verify=False)
    for module, callbacks in ((stock, []), (ours, [accumulate])):
        fit(DataLoader(WithEmpty(), batch_size=None), *callbacks, module=module, max_epochs=2)
    pairs = zip(ours.parameters(), stock.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in pairs)


# --- errors ----------------------------------------------------------------------------------------


class FailsOnce(Regression):
    """Runs out of memory in the pass that begins with a sample, once."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[2]))
        if int(batch[2][0]) == self.first:
            self.first = -1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("mode", "first", "failed"), [("step", 0, 86), ("step", 86, 86), ("loader", 0, 86)])
def test_the_pass_that_failed_counts(mode: Any, first: int, failed: int) -> None:
    """The limit was 119, and a batch of 256 runs in pieces of 86, 85 and 85: at most 43 come next."""
    module = FailsOnce(first)
    callback = AutoAccumulate(micro_batch_size=119, micro_batching=mode, verify=False)
    with pytest.warns(
        UserWarning, match=f"in training with {failed} samples .* of at most {(failed + 1) // 2} samples"
    ):
        fit(DataLoader(Samples(256), 256), callback, module=module, max_epochs=1)
    assert max(module.sizes[-6:]) <= (failed + 1) // 2
    assert worst_error(module.gradients, plain_loop(Samples(256), [[*range(256)]])) <= 1e-12


# --- a second fit ----------------------------------------------------------------------------------


def counted_by_hand(counts: dict[int, int], epochs: int) -> list[list[int]]:
    """Windows of a schedule by samples, over epochs of in-order samples."""
    windows = []
    seen = 0
    for _ in range(epochs):
        start = 0
        while start < SIZE:
            size = max((begin, count) for begin, count in counts.items() if begin <= seen)[1]
            end = min(start + size, SIZE)
            windows.append([*range(start, end)])
            seen += end - start
            start = end
    return windows


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_schedule_by_samples_goes_on_in_a_second_fit(mode: Any, is_new: bool) -> None:
    """``max_epochs`` raised, as in a notebook, with the same callback or with a new one."""
    counts = {0: 2, 24: 4, 40: 8}

    def ours() -> AutoAccumulate:
        return AutoAccumulate(by_samples(counts), micro_batch_size=2, micro_batching=mode, verify=False)

    module = Regression()
    data = DataLoader(Samples(SIZE), 2)
    _, trainer = fit(data, ours(), module=module, max_epochs=1)
    for epochs in (2, 4):
        if is_new:
            trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, AutoAccumulate)] + [ours()]
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, data)
    assert worst_error(module.gradients, plain_loop(Samples(SIZE), counted_by_hand(counts, 4))) <= 1e-12


def test_a_fit_after_one_without_the_callback_reads_its_counts() -> None:
    counts = {0: 2, 12: 4}
    module = Regression()
    data = DataLoader(Samples(SIZE), 2)
    _, trainer = fit(data, module=module, max_epochs=1)
    trainer.callbacks.append(AutoAccumulate(by_samples(counts), micro_batch_size=2, verify=False))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    in_pairs = [[start, start + 1] for start in range(0, SIZE, 2)]
    in_fours = [[*range(start, start + 4)] for start in range(0, SIZE, 4)]
    assert worst_error(module.gradients, plain_loop(Samples(SIZE), in_pairs + in_fours)) <= 1e-12


class Sized(Samples):
    """Has as many samples as is said."""

    length = 40

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(("before", "length", "windows"), [(20, 15, [4, 4, 4, 3]), (18, 30, [4] * 5)])
@pytest.mark.loader_only(reason="in the step batches are stock Lightning's")
def test_the_first_epoch_has_the_samples_that_are_there_as_it_begins(
    before: int, length: int, windows: list[int]
) -> None:
    """Also if a hook changes the data after they were set up: none of a window's micro-batches is missing."""

    class Grows(Regression):
        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.dataset.length = length

    data = Sized(40)
    data.length = before
    module, _ = fit(DataLoader(data, 4), AutoAccumulate(micro_batch_size=3, verify=False), module=Grows(), max_epochs=1)
    assert [len(window) for window in module.windows] == windows
