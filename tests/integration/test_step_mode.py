"""``micro_batching="step"``: batches are cut in the training step, and all that is seen of it is the gradient's peak.

Each run is compared with one whose micro-batch is the whole batch, or with one without the callback.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from reference import Regression, Samples, StreamOf, cut, fit, plain_loop, worst_error
from torch.utils.data import DataLoader
from wide import Wide

from lightning_ga import AutoAccumulate
from lightning_ga.testing import limit_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*[Nn]o (positive|negative) samples in targets:UserWarning"),
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero:UserWarning"),
]
SAMPLES, BATCH = 45, 8  # a ragged batch, in a ragged window where the factor is 2 or 4


def in_step(micro_batch: int, **arguments: Any) -> AutoAccumulate:
    return AutoAccumulate(micro_batch_size=micro_batch, micro_batching="step", verify=False, **arguments)


def loader(size: int = SAMPLES, batch_size: int = BATCH, **settings: Any) -> "DataLoader[Any]":
    return DataLoader(Samples(size), batch_size=batch_size, **settings)


def close(ours: Any, theirs: Any, rtol: float = 1e-6) -> None:
    """Logged values are kept in fp32."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 100)


# --- logs and metrics ---------------------------------------------------------------------------


class Custom(torchmetrics.Metric):
    """As users write them: ``full_state_update`` is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, predicted: torch.Tensor, targets: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, predicted.max())
        self.values.append((predicted - targets).flatten())

    def compute(self) -> torch.Tensor:
        return self.largest + torch.cat(self.values).median()


class FullState(Custom):
    full_state_update = True


def metrics() -> dict[str, torchmetrics.Metric]:
    return {
        "accuracy": torchmetrics.classification.BinaryAccuracy(),
        "mean": torchmetrics.MeanMetric(),
        "largest": torchmetrics.MaxMetric(),
        "auroc": torchmetrics.classification.BinaryAUROC(),
        "f1": torchmetrics.classification.BinaryF1Score(),
        "r2": torchmetrics.R2Score(),
        "pearson": torchmetrics.PearsonCorrCoef(),
        "custom": Custom(),
        "full": FullState(),
    }


class Logging(Regression):
    """Logs in all the ways there are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.metrics = torch.nn.ModuleDict(metrics())
        self.collection = torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.classification.BinaryPrecision(),
                "recall": torchmetrics.classification.BinaryRecall(),
            },
            prefix="collection/",
        )
        self.updated = torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.classification.BinaryPrecision(),
                "recall": torchmetrics.classification.BinaryRecall(),
            },
            prefix="updated/",
        )
        self.confusion = torchmetrics.classification.BinaryConfusionMatrix()
        self.matrices: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets, indices = batch
        predicted = self.net(inputs)
        value = torch.nn.functional.mse_loss(predicted, targets)
        wanted, given = (targets > 0).long().flatten(), torch.sigmoid(predicted.detach()).flatten()
        both = {"on_step": True, "on_epoch": True}
        self.log("loss", value, prog_bar=True, **both)
        self.log("weighted", value, batch_size=len(inputs), **both)
        self.log("constant size", value, batch_size=BATCH, **both)
        self.log("size of one", value, batch_size=1, **both)
        self.log("items", value, batch_size=inputs.numel(), on_epoch=True)
        self.log("count", float(len(inputs)), reduce_fx="sum", **both)
        self.log("highest", predicted.max(), reduce_fx="max", **both)
        self.log("lowest", predicted.min(), reduce_fx=torch.min, **both)
        self.log("step only", value, on_step=True, on_epoch=False)
        self.log_dict({"a": value, "b": 2 * value}, **both)
        for name, metric in self.metrics.items():
            if name in ("mean", "largest"):
                metric(predicted.detach().flatten())
            elif name in ("r2", "pearson", "custom", "full"):
                metric(predicted.detach().flatten(), targets.flatten())
            else:
                metric(given, wanted)
            self.log(name, metric, **both)
        self.collection(given, wanted)
        self.log_dict(self.collection, **both)
        self.updated.update(given, wanted)
        self.log_dict(self.updated, on_step=False, on_epoch=True)
        self.confusion(given, wanted)
        return {"loss": value, "predicted": predicted, "indices": indices, "size": len(inputs)}

    def on_train_epoch_end(self) -> None:
        self.matrices.append(self.confusion.compute())
        self.confusion.reset()


class Watch(pl.Callback):
    """All that is seen of a training from outside, and logs of its own."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.epochs: list[Any] = []
        self.bars: list[Any] = []
        self.outputs: list[Any] = []
        self.counts: list[Any] = []
        self.hooks: dict[str, int] = {}
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.log("callback/start", float(batch_idx), on_step=True, on_epoch=True)
        self.sizes = len(batch[0]) if isinstance(batch, (list, tuple)) else None

    def on_before_zero_grad(self, *_: Any) -> None:
        self.hooks["zero_grad"] = self.hooks.get("zero_grad", 0) + 1

    def on_before_backward(self, trainer: Any, module: Any, value: torch.Tensor) -> None:
        self.hooks["backward"] = self.hooks.get("backward", 0) + 1
        self.log("callback/backward", value.detach(), on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.hooks["step"] = self.hooks.get("step", 0) + 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("callback/end", 2.0 * batch_idx, on_step=True, on_epoch=True)
        self.steps.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        self.bars.append({key: float(value) for key, value in trainer.progress_bar_metrics.items()})
        self.outputs.append(outputs)
        loop = trainer.fit_loop.epoch_loop
        self.counts.append((batch_idx, self.sizes, trainer.global_step, loop.total_batch_idx, trainer.is_last_batch))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def watched(*callbacks: pl.Callback, module: Any = None, data: Any = None, **settings: Any) -> tuple[Any, Watch, Any]:
    watch = Watch()
    module = Logging() if module is None else module
    module, trainer = fit(loader() if data is None else data, *callbacks, watch, module=module, **settings)
    return module, watch, trainer


@pytest.mark.parametrize("micro_batch", [3, 7])
def test_a_batch_in_pieces_looks_like_a_batch(micro_batch: int) -> None:
    """Logged values, metrics, the bar, outputs, counters and hooks are those of stock Lightning."""
    stock, theirs, stock_trainer = watched()
    module, ours, trainer = watched(in_step(micro_batch))
    assert worst_error(module.gradients, stock.gradients) <= 1e-12
    assert ours.counts == theirs.counts
    close(ours.outputs, theirs.outputs)
    close(ours.steps, theirs.steps)
    close(ours.bars, theirs.bars)
    close(ours.epochs, theirs.epochs)
    close(module.matrices, stock.matrices)
    hooks = ours.hooks.pop("backward"), theirs.hooks.pop("backward")
    assert hooks[0] == 2 * sum(-(-len(batch) // micro_batch) for batch in cut(range(SAMPLES), BATCH)) > hooks[1]
    assert ours.hooks == theirs.hooks
    assert all(metric._update_count == stock.metrics[name]._update_count for name, metric in module.metrics.items())


@pytest.mark.parametrize("factor", [2, 3])
def test_with_accumulation_in_the_recipe(factor: int) -> None:
    """The batches of the recipe, of its own sizes in a ragged window too, seen as they are without the callback."""
    _, stock, _ = watched(accumulate_grad_batches=factor)
    whole, theirs, _ = watched(in_step(BATCH), accumulate_grad_batches=factor)
    module, ours, _ = watched(in_step(3), accumulate_grad_batches=factor)
    windows = cut(range(SAMPLES), BATCH * factor) * 2
    assert worst_error(module.gradients, plain_loop(Samples(SAMPLES), windows)) <= 1e-12
    assert ours.counts == theirs.counts == stock.counts
    close(ours.outputs, theirs.outputs)
    close(ours.steps, theirs.steps)
    close(ours.epochs, theirs.epochs)
    assert ours.hooks["zero_grad"] == stock.hooks["zero_grad"] == len(windows)
    assert ours.hooks["step"] == len(windows)


OWN = [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [13, 14], [15, 16, 17, 18], [19, 20, 21], [22, 23, 24, 25, 26]]


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("kind", ["batch sampler", "stream"])
def test_batches_are_those_of_the_loader(kind: str, factor: int) -> None:
    """Batches of a sampler of one's own, each of its own size, and those of a stream."""
    if kind == "stream":
        windows, data = cut(range(SAMPLES), BATCH * factor), DataLoader(StreamOf(Samples(SAMPLES)), batch_size=BATCH)
    else:
        windows = [sum(OWN[k : k + factor], []) for k in range(0, len(OWN), factor)]
        data = DataLoader(Samples(SAMPLES), batch_sampler=OWN)
    _, theirs, _ = watched(module=Regression(), data=data, accumulate_grad_batches=factor)
    module, ours, _ = watched(in_step(2), module=Regression(), data=data, accumulate_grad_batches=factor)
    assert ours.counts == theirs.counts
    assert worst_error(module.gradients, plain_loop(Samples(SAMPLES), windows * 2)) <= 1e-12
    assert max(len(indices) for _, indices in module.micro_batches) == 2


# --- the way to the device -----------------------------------------------------------------------


def test_hooks_of_the_transfer_see_the_batch() -> None:
    """And callbacks, the step and its parts see what they make of it, in Lightning's order."""

    class Travelling(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[str, int]] = []

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.told.append(("before", len(batch[0])))
            return batch

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            self.told.append(("moved", len(batch[0])))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.told.append(("after", len(batch[0])))
            inputs, targets, indices = batch
            return {"x": inputs, "y": targets + inputs.mean(), "indices": indices}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step((batch["x"], batch["y"], batch["indices"]), batch_idx)

    class Reading(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.told.append(("start", len(batch["x"])))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.told.append(("end", len(batch["x"])))

    def run(*callbacks: Any) -> Travelling:
        module, _ = fit(loader(), *callbacks, Reading(), module=Travelling(), max_epochs=1)
        return module

    ours, stock = run(in_step(3)), run()
    assert ours.told == stock.told
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12


def test_a_batch_without_such_hooks_stays_on_the_host_and_travels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = pl.LightningModule._apply_batch_transfer_handler

    def noted(module: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
        moved.append(len(batch[0]))
        return real(module, batch, *arguments, **settings)

    monkeypatch.setattr(pl.LightningModule, "_apply_batch_transfer_handler", noted)
    fit(loader(), in_step(3), max_epochs=1)
    # On a CPU there is nothing to move: the batch is there.
    assert moved == ([3, 3, 2] * 5 + [3, 2] if torch.cuda.is_available() else [8] * 5 + [5])


# --- optimization -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_that_return_nothing() -> None:
    """For a piece: the mean is over the others. For a batch: it is passed over, as in stock Lightning."""

    class Skipping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kept = not set(batch[2].tolist()) & self.skipped
            return super().training_step(batch, batch_idx) if kept else None

    module = Skipping()
    module.skipped = {3, 4, 5, *range(8, 16)}  # the second piece, and a whole batch
    _, watch, _ = watched(in_step(3), module=module, max_epochs=1, accumulate_grad_batches=2)
    windows = [[0, 1, 2, 6, 7], list(range(16, 32)), list(range(32, 45))]
    assert worst_error(module.gradients, plain_loop(Samples(SAMPLES), windows)) <= 1e-12
    assert watch.outputs[1] == {}


def test_the_limit_counts_the_whole_batch_where_it_lies_in_the_same_memory() -> None:
    """On a CPU what is cut off a batch is not freed: a fit at the limit found never runs out."""

    def train(micro_batch: int | str, on_oom: str = "raise") -> AutoAccumulate:
        callback = AutoAccumulate(micro_batch_size=micro_batch, micro_batching="step", verify=False, on_oom=on_oom)
        data = Samples(512)
        with limit_memory(60_000):
            fit(DataLoader(data, batch_size=256), callback, module=Wide(), max_epochs=1)
        return callback

    probed = train("auto", on_oom="split")
    limit = probed.probe.limit
    assert probed.oom_events == 0
    assert 1 < limit < 40
    assert dict(probed.probe.curve)[limit + 1] > 60_000
    train(limit)
    with pytest.raises(torch.OutOfMemoryError):
        train(2 * limit)


def test_token_weights() -> None:
    """A mean over what ``normalize`` counts: gradient, loss and log are those of the batch."""

    class Weighted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets, indices = batch
            weights = tokens(batch)[:, None]
            value = (weights * (self.net(inputs) - targets).square()).sum() / weights.sum()
            self.log("loss", value, on_step=True, batch_size=len(inputs))
            self.log("by tokens", value, on_step=True, on_epoch=True, batch_size=int(weights.sum()))
            return value

    def tokens(batch: Any) -> torch.Tensor:
        return (1 + batch[2] % 5).double()

    stock, theirs, _ = watched(module=Weighted())
    module, ours, _ = watched(in_step(3, normalize=lambda batch: float(tokens(batch).sum())), module=Weighted())
    assert worst_error(module.gradients, stock.gradients) <= 1e-12
    close([step["by tokens"] for step in ours.steps], [step["by tokens"] for step in theirs.steps])
    close([step["loss"] for step in ours.steps], [step["loss"] for step in theirs.steps])
    close([epoch["by tokens_epoch"] for epoch in ours.epochs], [epoch["by tokens_epoch"] for epoch in theirs.epochs])
