"""Hooks that keep gradients, count batches, set datasets or change gradients: put back by the check, or told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from true_support import LOADER, STEP, Case, Task, Way, cut_rightly, each_cut, each_way, error, of_pairs, pairs, train

from lightning_ga import AutoAccumulate


class Recalling(Task):
    """The gradient of the last step, kept where the loop zeroes it, pulls the next loss."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient = self.net[2].weight.grad
        self.last = self.last if gradient is None else gradient.clone()

    def loss(self, batch: Any) -> torch.Tensor:
        pull = 0.0 if self.last is None else 0.1 * (self.last * self.net[2].weight).sum()
        return super().loss(batch) + pull


def test_what_is_kept_where_gradients_are_zeroed_is_told_in_the_loader() -> None:
    """That hook runs after the forward pass of a window's first micro-batch: the others meet what it keeps."""
    loader, stock = DataLoader(pairs(40), batch_size=8), train(Recalling(), DataLoader(pairs(40), batch_size=8))
    ours = train(Recalling(), loader, LOADER.callback(8, 3))
    assert error(ours, stock) > 1e-6
    assert len(ours.told) == 1
    ours = train(Recalling(), loader, STEP.callback(8, 3))
    assert error(ours, stock) <= 1e-12 or len(ours.told) == 1


class Planned(Task):
    """A hook at the start counts the batches of the run; a loss's weight, or a learning rate, follows by its steps."""

    def __init__(self, what: str, *, divides: bool = False) -> None:
        super().__init__()
        self.what, self.divides = what, divides

    def plan(self) -> None:
        factor = self.trainer.accumulate_grad_batches if self.divides else 1
        self.total = self.trainer.num_training_batches // factor * self.trainer.max_epochs

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1.0 + self.global_step / self.total if self.what == "loss" else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups if self.what == "rate" else ():
            group["lr"] = 0.1 * (1 - self.global_step / self.total)


class AtStart(Planned):
    def on_train_start(self) -> None:
        self.plan()


class AtEpochs(Planned):
    def on_train_epoch_start(self) -> None:
        self.plan()


@pytest.mark.parametrize("kind", [AtStart, AtEpochs])
@pytest.mark.parametrize("what", ["loss", "rate"])
@each_cut
def test_batches_that_are_counted_at_the_start_are_told_in_the_loader(what: str, kind: Any, way: Way) -> None:
    """Micro-batches are counted there; with the factor they tell the same number of steps."""
    stock = train(kind(what), of_pairs())
    ours = train(kind(what), of_pairs(), way.callback(8, 4))
    is_right = error(ours, stock) <= 1e-12
    assert is_right == (way.mode == "step")
    assert len(ours.told) == (not is_right)
    ours = train(kind(what, divides=True), of_pairs(), way.callback(8, 4))
    assert error(ours, stock) <= 1e-12
    assert ours.told == []


class Centering(Task):
    """A hook keeps a mean over each batch, from which the next is centered."""

    mean = 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        self.mean = 0.5 * self.mean + 0.5 * float(batch[1].mean())

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0], batch[1] - self.mean))


@each_cut
def test_a_hook_that_reads_the_batch_is_told_where_it_gets_micro_batches(way: Way) -> None:
    """In step mode it gets the whole batch, in the check, too."""
    ours = train(Centering(), of_pairs(), way.callback(8, 4))
    is_right = error(ours, train(Centering(), of_pairs())) <= 1e-12
    assert is_right == (way.mode == "step")
    assert len(ours.told) == (not is_right)


class Hardening(Dataset):
    """Its samples are what an attribute says, which hooks set."""

    def __init__(self) -> None:
        self.samples, self.hard = pairs(24), 0.0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        inputs, targets = self.samples[number]
        return inputs * (1 + self.hard), targets


class Curriculum(Task):
    def on_train_batch_end(self, *_: Any) -> None:
        dataset = self.trainer.train_dataloader.dataset
        getattr(dataset, "dataset", dataset).hard += 0.1


class Itself(Hardening):
    """Says of itself what wrappers say of the dataset within, which need not end."""

    def __init__(self) -> None:
        super().__init__()
        self.dataset = self


WRAPPED: list[Callable[[], Any]] = [Hardening, lambda: Subset(Hardening(), range(24)), Itself]


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("make", WRAPPED, ids=["bare", "wrapped", "itself"])
def test_what_hooks_set_in_a_dataset_before_training_is_put_back(make: Any, mode: str) -> None:
    """Nothing is cut, so the run is the stock run bit for bit."""

    def loader() -> DataLoader[Any]:
        return DataLoader(make(), batch_size=8)

    ours = train(Curriculum(), loader(), AutoAccumulate(micro_batching=mode))
    assert error(ours, train(Curriculum(), loader())) == 0.0


def left_out(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


@each_way
def test_samples_that_are_none_and_left_out_are_not_measured(way: Way) -> None:
    samples = [None if number % 7 == 0 else (inputs, inputs[:2]) for number, (inputs, _) in enumerate(pairs(48))]
    case = Case(lambda: Task(outputs=2), lambda: DataLoader(samples, batch_size=8, collate_fn=left_out))
    cut_rightly(case, way)


class Clipping(Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


class Reading(Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.norm = sum(parameter.grad.norm() for parameter in module.parameters())


@pytest.mark.parametrize("other", [Clipping, Reading])
@each_cut
def test_a_callback_that_changes_the_gradients_of_micro_batches_is_told(other: type[Callback], way: Way) -> None:
    """In step mode it sees those of the batch; one that reads them changes nothing."""
    ours, stock = train(Task(), of_pairs(), way.callback(8, 4), other()), train(Task(), of_pairs(), other())
    is_right = way.mode == "step" or other is Reading
    assert (error(ours, stock) <= 1e-12) == is_right
    assert len(ours.told) == (not is_right)
