"""What the pieces of a batch log and return becomes what the whole batch would have: the oracle is the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from reference import Regression, Samples, quiet_trainer
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.fit.pieces import Pieces, merge

BATCHES = [torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) for size in (8, 5)]
Log = Callable[[_ResultCollection, Tensor], None]


def logging(*, of: Callable[[Tensor], Tensor] = Tensor.mean, size: Any = lambda batch: None, reduce_fx: Any = "mean"):
    """A step that logs a value of its batch."""

    def log(results: _ResultCollection, batch: Tensor) -> None:
        settings = {"on_step": True, "reduce_fx": reduce_fx, "batch_size": size(batch)}
        results.log("training_step", "a", of(batch), **settings)

    return log


def twice(results: _ResultCollection, batch: Tensor) -> None:
    """Two values of one name, and one of another hook."""
    for value in (batch.mean(), batch.square().mean()):
        results.log("training_step", "a", value)
    results.log("on_after_backward", "a", batch.exp().mean(), on_step=True)


def tokens(batch: Tensor) -> int:
    """As many in each sample."""
    return batch.numel()


def targets(batch: Tensor) -> Tensor:
    """Not as many in each sample, nor by chance in each piece."""
    return batch[batch > -0.5]


def mean_over_targets(batch: Tensor) -> Tensor:
    return targets(batch).mean()


LOGS: dict[str, Log] = {
    "mean": logging(),
    **{
        f"sum {number}": logging(of=Tensor.sum, reduce_fx=kind)
        for number, kind in enumerate(("sum", "SUM", torch.sum, sum))
    },
    "max": logging(of=Tensor.max, reduce_fx="max"),
    "min": logging(of=Tensor.min, reduce_fx=torch.min),
    "samples counted": logging(size=len),
    "tokens counted": logging(size=tokens),
    "targets counted": logging(of=mean_over_targets, size=lambda batch: targets(batch).numel()),
    "a constant": logging(size=lambda batch: 8),
    "one": logging(size=lambda batch: 1),
    "half precision": logging(of=lambda batch: batch.round().mean().half()),
    "twice": twice,
}


def whole_and_pieces(log: Log, cuts: tuple[int, int]) -> tuple[_ResultCollection, _ResultCollection]:
    whole, ours = _ResultCollection(training=True), _ResultCollection(training=True)
    for batch, most in zip(BATCHES, cuts):
        for results in (whole, ours):
            results.batch, results.batch_size = batch, None
        log(whole, batch)
        pieces = Pieces(ours)
        for piece in batch.split(most):
            with pieces.piece(samples=len(piece), share=len(piece)):
                log(ours, piece)
        pieces.finish()
    return whole, ours


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("cuts", [(3, 2), (8, 3), (2, 4)], ids=str)
def test_logged_values_are_those_of_whole_batches(kind: str, cuts: tuple[int, int]) -> None:
    """The value of the last step, and that of the epoch, in which a smaller batch weighs less."""
    whole, ours = whole_and_pieces(LOGS[kind], cuts)
    assert whole.keys() == ours.keys()
    tolerance = {"rtol": 1e-3 if kind == "half precision" else 1e-12, "atol": 1e-12}
    for on_step in (True, False):
        torch.testing.assert_close(ours.metrics(on_step)["log"], whole.metrics(on_step)["log"], **tolerance)


def test_a_mean_over_tokens_is_weighed_by_tokens() -> None:
    """As ``normalize`` counts them; a piece without any has a mean over nothing."""
    results = _ResultCollection(training=True)
    pieces = Pieces(results)
    for loss, count in ((1.0, 10), (4.0, 20), (float("nan"), 0)):
        with pieces.piece(samples=2, share=count):
            results.log("training_step", "loss", torch.tensor(loss), batch_size=2)
        pieces.add({"loss": torch.tensor(loss)})
    assert pieces.finish() == {"loss": torch.tensor(3.0)}
    assert results["training_step.loss"].compute() == 3
    assert results["training_step.loss"].cumulated_batch_size == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_dtype_of_a_loss_is_kept(dtype: torch.dtype) -> None:
    largest = torch.tensor(65504.0).to(dtype)
    whole = merge([largest, largest * 1.0], [3, 2], [3, 2])
    assert whole.dtype == dtype
    assert whole == largest


class Boxes(Tensor):
    """Refuses to be joined, as a class of the user's own may."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.cat, torch.stack)
        return super().__torch_function__(func, types, args, kwargs)


def test_graphs_and_classes_are_left_behind() -> None:
    """Outputs are stored for hooks; the graphs have done their work, each before the next piece runs."""
    pieces, part = Pieces(None), torch.ones(2, requires_grad=True)
    for _ in range(2):
        with pieces.piece(samples=2, share=2):
            assert not any(output["x"].requires_grad for output in pieces._outputs)
            boxes = torch.ones(2, 4).as_subclass(Boxes)
            rows = [part[0] * 2, part[1] * 2]
            pieces.add({"loss": part.sum(), "x": part * 2, "rows": rows, "boxes": boxes, "score": boxes.sum()})
    whole = pieces.finish()
    tensors = [whole["loss"], whole["x"], *whole["rows"], whole["boxes"], whole["score"]]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert all(type(tensor) is Tensor for tensor in tensors)
    assert whole["boxes"].shape == (4, 4)


MERGED: dict[str, tuple[list[Any], list[int], Any]] = {
    "nothing": ([None, None], [2, 1], None),
    "skipped in a piece": ([{"x": 1.0}, None, {"x": 4.0}], [2, 5, 1], {"x": 2.0}),
    "a key in some": ([{"x": 1.0}, {"x": 1.0, "y": "a"}], [2, 1], {"x": 1.0, "y": "a"}),
    "equal text": ([{"x": "a"}, {"x": "a"}], [2, 1], {"x": "a"}),
    "other text": ([{"x": "a"}, {"x": "b"}], [2, 1], {"x": ["a", "b"]}),
    "other whole numbers": ([{"x": 7}, {"x": 10}], [2, 1], {"x": 8.0}),
    "the number of samples": ([{"n": 2}, {"n": 1}], [2, 1], {"n": 3}),
    "ones of one sample": ([{"n": 1}, {"n": 1}], [1, 1], {"n": 1}),
    "other truths": ([{"x": True}, {"x": False}], [2, 1], {"x": [True, False]}),
    "lists by sample": ([{"x": ["a", "b"]}, {"x": ["c"]}], [2, 1], {"x": ["a", "b", "c"]}),
    "lists of findings": ([{"x": [1, 2, 3]}, {"x": []}], [2, 1], {"x": [1, 2, 3]}),
    "lists of fields": ([{"x": [1.0, "a", 2.0]}, {"x": [4.0, "a", 5.0]}], [2, 1], {"x": [2.0, "a", 3.0]}),
    "detections": ([[{"box": 1}, {"box": 2}], [{"box": 3}]], [2, 1], [{"box": 1}, {"box": 2}, {"box": 3}]),
    "tuples of unlike lengths": ([("a", "b", "c"), ("d", "e")], [3, 2], [("a", "b", "c"), ("d", "e")]),
    "numbers of unlike counts": ([(1.0, 2.0, 3.0), (4.0, 5.0)], [3, 2], [(1.0, 2.0, 3.0), (4.0, 5.0)]),
    "one whole number in tensors": ([{"x": torch.tensor(7)}, {"x": torch.tensor(7)}], [2, 1], {"x": torch.tensor(7)}),
}


@pytest.mark.parametrize("name", MERGED)
def test_outputs_become_one(name: str) -> None:
    """What is by sample is joined, numbers are averaged, what is equal stays, the rest is listed."""
    outputs, sizes, expected = MERGED[name]
    assert merge(outputs, sizes, sizes) == expected


@dataclass
class Encoded:
    hidden: tuple[Tensor, ...]
    loss: float


def test_fields_are_merged_in_containers_of_their_own() -> None:
    """Hidden states of two layers, in a tuple as long as their pieces."""
    outputs = [Encoded((torch.zeros(2, 5), torch.ones(2, 5)), loss) for loss in (1.0, 3.0)]
    whole = merge(outputs, [2, 2], [2, 2])
    assert [state.shape for state in whole.hidden] == [(4, 5), (4, 5)]
    assert whole.hidden[1].all()
    assert (whole.loss, outputs[0].loss) == (2.0, 1.0)


@pytest.mark.parametrize("make", [torch.as_tensor, np.asarray])
def test_what_is_not_by_sample_is_no_mean(make: Any) -> None:
    """The boxes of all pictures of a piece, which may be as many in both; equal ones stay."""
    outputs = [{"boxes": make(np.full((5, 4), k)), "scores": make(np.ones(k)), "classes": make(np.arange(4))}
               for k in (1, 2)]  # fmt: skip
    whole = merge(outputs, [3, 2], [3, 2])
    assert [float(part.sum()) / 20 for part in whole["boxes"]] == [1, 2]
    assert [len(part) for part in whole["scores"]] == [1, 2]
    assert whole["classes"].tolist() == [0, 1, 2, 3]


def test_a_loss_of_one_element_is_a_mean_in_pieces_of_one_sample() -> None:
    """Another tensor of this shape has an entry for each sample."""
    outputs = [{"loss": torch.tensor([value]), "score": torch.tensor([value])} for value in (1.0, 3.0)]
    whole = merge(outputs, [1, 1], [1, 1])
    assert whole["loss"].tolist() == [2.0]
    assert whole["score"].tolist() == [1.0, 3.0]


class LossOfOneElement(Regression):
    """Returns its loss alone, in a tensor of shape (1,)."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).reshape(1)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.shapes.append(outputs["loss"].shape)


def test_the_loss_of_a_training_step_keeps_its_shape() -> None:
    module = LossOfOneElement()
    callback = AutoAccumulate(micro_batching="step", micro_batch_size=1, verify=False)
    quiet_trainer(callback, max_epochs=1).fit(module, DataLoader(Samples(4), 4))
    assert module.shapes == [(1,)]


def test_arrays_by_sample_are_joined() -> None:
    outputs = [{"x": np.full((n, 2), n), "text": np.array(["a"] * n)} for n in (2, 1)]
    whole = merge(outputs, [2, 1], [2, 1])
    assert whole["x"].tolist() == [[2, 2], [2, 2], [1, 1]]
    assert whole["text"].tolist() == ["a", "a", "a"]


def test_sequences_that_cannot_be_joined_are_listed() -> None:
    """Packed and nested ones, and those padded to the longest of their piece."""
    packed = [pack_sequence([torch.arange(float(length))]) for length in (2, 5)]
    nested = [torch.nested.nested_tensor([torch.ones(length)], layout=torch.jagged) for length in (2, 5)]
    padded = [torch.ones(1, length) for length in (2, 5)]
    for outputs in (packed, nested, padded):
        whole = merge(outputs, [1, 1], [1, 1])
        assert isinstance(whole, list)
        assert len(whole) == 2


class Summed(Regression):
    """Logs sums over batches: of sums over samples, of means over samples, and of ones."""

    def __init__(self, *, fits: int = 10**9) -> None:
        super().__init__()
        self.fits = fits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step("val", batch)
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def step(self, stage: str, batch: Any) -> Tensor:
        errors = (self.net(batch[0]) - batch[1]).square()
        sums = {"sum": errors.sum(), "mean": errors.mean(), "batches": 1.0}
        for name, value in sums.items():
            self.log(f"{stage}/{name}", value, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(f"{stage}/default", errors.mean(), on_step=False, on_epoch=True)
        return errors.mean()


@pytest.mark.filterwarnings("ignore:Memory ran out in validation:UserWarning")
def test_a_sum_is_the_sum_over_pieces() -> None:
    """That of sums over samples is stock Lightning's; means over samples and counts of batches are four times larger.

    So says *What hooks see*. In validation, memory runs out with more than two samples.
    """
    found: list[dict[str, float]] = []
    cut_in_step = AutoAccumulate(micro_batching="step", micro_batch_size=2, verify=False)
    for module, callbacks in ((Summed(fits=2), [cut_in_step]), (Summed(), [])):
        trainer = quiet_trainer(*callbacks, max_epochs=1)
        trainer.fit(module, DataLoader(Samples(24), 8), DataLoader(Samples(24), 8))
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    ours, stock = found
    for stage in ("train", "val"):
        for name, factor in {"sum": 1, "default": 1, "mean": 4, "batches": 4}.items():
            assert ours[f"{stage}/{name}"] == pytest.approx(factor * stock[f"{stage}/{name}"], rel=1e-6)
