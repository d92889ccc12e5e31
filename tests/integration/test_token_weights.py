"""Losses that are a mean over tokens: exact whatever the counts are, windows and micro-batches without any included."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from reference import Samples, cut, fit, plain_loop, worst_error
from texts import Reading, Texts, pad, plain_gradients
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError
from lightning_ga.plan.item_counters import AttentionMaskTokens, TargetTokens
from lightning_ga.schedule import by_step


class Sequences(Texts):
    """A few have no target."""

    def __init__(self, size: int, empty: Sequence[int] = ()) -> None:
        super().__init__(size)
        for number in empty:
            none = torch.full_like(self.samples[number]["labels"], -100)
            self.samples[number] = {**self.samples[number], "labels": none}


def collate(texts: Sequence[Any]) -> dict[str, torch.Tensor]:
    batch = pad(texts)
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


class ByPyTorch(Reading):
    """The reduction is PyTorch's own; that of ``Reading`` is written by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch["words"]).transpose(1, 2), batch["labels"])


def train_texts(
    data: Texts, batch: int, micro_batch: int, counter: Any, module: Reading | None = None, mode: Any = "loader"
) -> Reading:
    module = Reading("words") if module is None else module
    callback = AutoAccumulate(micro_batch_size=micro_batch, normalize=counter, micro_batching=mode)
    fit(DataLoader(data, batch, collate_fn=collate), callback, module=module, max_epochs=1)
    return module


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize(
    ("counter", "micro_batch"),
    [(TargetTokens(), 1), (AttentionMaskTokens(), 5), (lambda b: (b["labels"] >= 0).sum(), 5)],
)
def test_a_mean_over_tokens_is_exact(counter: Any, micro_batch: int, mode: str) -> None:
    """Whatever the counts are, ragged windows included."""
    data = Sequences(43)
    module = train_texts(data, 16, micro_batch, counter, mode=mode)
    assert worst_error(module.gradients, plain_gradients(data, cut(range(43), 16), "words")) <= 1e-12


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize(("kind", "empty"), [(Reading, (0, 1)), (ByPyTorch, (2, 3)), (Reading, (6, 7))])
def test_a_micro_batch_without_tokens_is_left_out(kind: type[Reading], empty: Sequence[int], mode: str) -> None:
    """First, between and last in its window, where a mean over nothing is NaN."""
    data = Sequences(16, empty)
    module = train_texts(data, 8, 2, TargetTokens(), kind("words"), mode)
    assert worst_error(module.gradients, plain_gradients(data, cut(range(16), 8), "words")) <= 1e-12


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_window_without_tokens_is_an_error(mode: str) -> None:
    """Rather than a step of NaN."""
    with pytest.raises(UserError, match="counted 0 in all micro-batches of a window"):
        train_texts(Sequences(16, range(8)), 8, 2, TargetTokens(), mode=mode)


def test_hooks_of_a_pass_without_tokens_end_with_the_fit() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("after the hook of the callback")

    module, data = Reading("words"), DataLoader(Sequences(16, (0, 1)), 8, collate_fn=collate)
    callbacks = AutoAccumulate(micro_batch_size=2, normalize=TargetTokens()), LambdaCallback(on_before_backward=fail)
    with pytest.raises(ValueError, match="after the hook"):
        fit(data, *callbacks, module=module)
    assert not any(parameter._backward_hooks for parameter in module.parameters())


def test_all_windows_of_a_schedule_are_looked_at() -> None:
    """Those of 8 samples are cut in equal micro-batches, those of 10 between them are not."""
    growing = by_step({0: 8, 1: 10, 3: 8})
    ours = AutoAccumulate(growing, micro_batch_size=4, normalize=None, micro_batching="loader")
    with pytest.warns(ExactnessWarning, match="normalize=None weighs micro-batches alike"):
        fit(DataLoader(Samples(44), 8), ours, max_epochs=1)
    assert ours.exactness is not None
    assert ours.exactness.cause == "weighted"


@pytest.mark.parametrize(("samples", "cause"), [(8, "exact"), (7, "weighted"), (15, "weighted")])
def test_micro_batches_that_weigh_alike_are_judged_so(samples: int, cause: str) -> None:
    """With ``normalize=None`` the loader's micro-batches of 4 + 3 are no mean over samples; 4 + 4 are.

    An epoch of 15 samples has a last window of 4 + 3.
    """
    data = Samples(samples)
    batch = min(samples, 8)
    ours = AutoAccumulate(batch, micro_batch_size=4, normalize=None, micro_batching="loader", batch_norm="ignore")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExactnessWarning)
        module, _ = fit(DataLoader(data, batch), ours, max_epochs=1)
    error = worst_error(module.gradients, plain_loop(data, cut(range(samples), batch)))
    assert ours.exactness is not None
    assert (error < 1e-12, ours.exactness.cause) == (cause == "exact", cause)
    said = [str(each.message) for each in caught if issubclass(each.category, ExactnessWarning)]
    assert (cause == "exact") == (said == [])
    assert all("normalize=None weighs micro-batches alike" in each for each in said)
