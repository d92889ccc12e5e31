"""``micro_batching="step"``: batches are cut in the training step, and all that is seen of it is the gradient's peak.

Each run is compared with one whose micro-batch is the whole batch, or with one without the callback.
"""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from reference import FEATURES, Regression, Samples, StreamOf, cut, fit, loss, plain_loop, worst_error
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
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


@pytest.mark.parametrize("micro_batch", [3, 4, 7])
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


@pytest.mark.parametrize("factor", [2, 3, 4])
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


def test_values_that_go_to_loggers(tmp_path: Any) -> None:
    """The same rows, under the same steps."""
    rows = []
    for name, callbacks in (("stock", ()), ("ours", (in_step(3),))):
        logger = CSVLogger(tmp_path, name=name)
        fit(loader(), *callbacks, module=Logging(), logger=logger, log_every_n_steps=2)
        rows.append((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines())
    assert rows[0][0] == rows[1][0]
    numbers = [[[float(x or "nan") for x in line.split(",")] for line in table[1:]] for table in rows]
    torch.testing.assert_close(torch.tensor(numbers[1]), torch.tensor(numbers[0]), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_wrappers_of_metrics_by_epoch() -> None:
    """Each sees all samples once; a metric that is used without being logged too."""

    class Wrapped(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.classwise = torchmetrics.ClasswiseWrapper(
                torchmetrics.classification.MulticlassF1Score(3, average=None)
            )
            self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError())
            self.values: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            predicted = self.net(batch[0]).detach()
            self.classwise(predicted.repeat(1, 3) * torch.tensor([1.0, -1.0, 0.5]), (batch[2] % 3))
            self.extremes.update(predicted, batch[1])
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.values.append((self.classwise.compute(), self.extremes.compute()["raw"]))
            self.classwise.reset()
            self.extremes.reset()

    stock, _ = fit(loader(), module=Wrapped())
    module, _ = fit(loader(), in_step(3), module=Wrapped())
    close(module.values, stock.values)


# --- structures ---------------------------------------------------------------------------------

Pair = namedtuple("Pair", "inputs targets indices extra")


@dataclass
class Record:
    inputs: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor
    extra: None = None


class Encoding(UserDict):
    """As ``BatchEncoding`` of Hugging Face: a ``UserDict`` with attributes and a list beside it."""

    def __init__(self, data: dict[str, Any], encodings: list[str]) -> None:
        super().__init__(data)
        self._encodings = encodings

    def to(self, device: Any, **_: Any) -> "Encoding":
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["data"][name]


class Graphs:
    """As a batch of torch_geometric: nodes of all graphs in one tensor, and which graph each belongs to."""

    def __init__(self, graphs: list[Any]) -> None:
        self.num_graphs = len(graphs)
        self.nodes = torch.cat([inputs.expand(1 + int(index) % 3, -1) for inputs, _, index in graphs])
        counts = torch.tensor([1 + int(index) % 3 for _, _, index in graphs])
        self.graph = torch.arange(len(graphs)).repeat_interleave(counts)
        self.targets, self.indices = torch.stack([g[1] for g in graphs]), torch.tensor([int(g[2]) for g in graphs])

    def to_data_list(self) -> list[Any]:
        return [(self.nodes[self.graph == k][0], self.targets[k], self.indices[k]) for k in range(self.num_graphs)]

    def to(self, device: Any, *_: Any, **__: Any) -> "Graphs":
        return self


def stacked(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs, targets, indices = zip(*samples)
    return torch.stack(inputs), torch.stack(targets), torch.tensor(indices)


def as_dict(samples: list[Any]) -> Any:
    inputs, targets, indices = stacked(samples)
    return {"inputs": inputs, "deep": {"targets": [targets, None], "indices": indices}, "scale": 0.5, "none": None}


def as_packed(samples: list[Any]) -> Any:
    inputs, targets, indices = stacked(samples)
    sequences = [row.view(-1, 1)[: FEATURES - int(i) % 3] for row, i in zip(inputs, indices)]
    return pack_sequence(sequences, enforce_sorted=False), targets, indices


def as_jagged(samples: list[Any]) -> Any:
    inputs, targets, indices = stacked(samples)
    sequences = [row.view(-1, 1)[: FEATURES - int(i) % 3] for row, i in zip(inputs, indices)]
    return torch.nested.nested_tensor(sequences, layout=torch.jagged), targets, indices


STRUCTURES: dict[str, Any] = {
    "tuple": (stacked, lambda b: b),
    "list": (lambda s: list(stacked(s)), lambda b: b),
    "nested dict": (as_dict, lambda b: (b["inputs"], b["deep"]["targets"][0], b["deep"]["indices"])),
    "named tuple": (lambda s: Pair(*stacked(s), None), lambda b: b[:3]),
    "dataclass": (lambda s: Record(*stacked(s)), lambda b: (b.inputs, b.targets, b.indices)),
    "encoding": (
        lambda s: Encoding(dict(zip(("inputs", "targets", "indices"), stacked(s))), [str(x[2]) for x in s]),
        lambda b: (b["inputs"], b.targets, b["indices"]),
    ),
    "packed": (as_packed, lambda b: (filled(pad_packed_sequence(b[0], batch_first=True)[0]), *b[1:])),
    "jagged": (as_jagged, lambda b: (filled(torch.nested.to_padded_tensor(b[0], 0.0)), *b[1:])),
    "samples": (lambda s: s, stacked),
    "graphs": (Graphs, lambda b: (pooled(b), b.targets, b.indices)),
}


def filled(padded: torch.Tensor) -> torch.Tensor:
    """Sequences of one number a step as features; pieces are padded to their own longest."""
    return torch.nn.functional.pad(padded.squeeze(-1), (0, FEATURES - padded.shape[1]))


def pooled(graphs: Graphs) -> torch.Tensor:
    total = torch.zeros(graphs.num_graphs, FEATURES, dtype=torch.float64).index_add_(0, graphs.graph, graphs.nodes)
    return total / torch.bincount(graphs.graph)[:, None]


class Structured(Regression):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read = read
        self.kinds: set[type] = set()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kinds.add(type(batch))
        inputs, targets, indices = self.read(batch)
        self.sizes.append(len(inputs))
        self.micro_batches.append((self.global_step, indices.tolist()))
        return loss(self.net, inputs, targets)


class Hooked(Structured):
    def split_batch(self, batch: Graphs, sizes: list[int]) -> Any:
        graphs = iter(batch.to_data_list())
        return [Graphs([next(graphs) for _ in range(size)]) for size in sizes]


@pytest.mark.parametrize("kind", STRUCTURES)
def test_batches_of_any_structure(kind: str) -> None:
    """Every piece is of the type that the loader yields, and gradients are those of the batch."""
    collate, read = STRUCTURES[kind]
    make = Hooked if kind == "graphs" else Structured
    data = {"batch_size": BATCH, "collate_fn": collate}
    stock, _ = fit(DataLoader(Samples(SAMPLES), **data), module=make(read))
    module, _ = fit(DataLoader(Samples(SAMPLES), **data), in_step(3), module=make(read))
    assert worst_error(module.gradients, stock.gradients) <= 1e-12
    assert module.windows == stock.windows
    assert module.kinds == stock.kinds
    assert max(module.sizes) == 3
    assert PackedSequence not in module.kinds


@pytest.mark.parametrize("kind", [kind for kind in STRUCTURES if kind != "nested dict"])  # two fields for two samples
@pytest.mark.parametrize("size", [2, 3, 4])
def test_batches_of_few_samples(kind: str, size: int) -> None:
    """The loader's own batch size tells samples from fields, before the batch is moved too."""
    collate, read = STRUCTURES[kind]
    make = Hooked if kind == "graphs" else Structured
    data = DataLoader(Samples(11), batch_size=size, collate_fn=collate)
    stock, _ = fit(data, module=make(read), max_epochs=1)
    module, _ = fit(data, in_step(1), module=make(read), max_epochs=1)
    assert worst_error(module.gradients, stock.gradients) <= 1e-12
    assert set(module.sizes) == {1}


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
    assert moved == [3, 3, 2] * 5 + [3, 2]


# --- optimization -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2, "samples": 48},
    ],
    ids=str,
)
def test_clipping(settings: dict[str, Any]) -> None:
    """Of the whole gradient, once a step."""
    settings = dict(settings)
    size = settings.pop("samples", SAMPLES)
    stock, _ = fit(loader(size), **settings)
    ours, _ = fit(loader(size), in_step(3), **settings)
    close(list(ours.parameters()), list(stock.parameters()), 1e-12)


@pytest.mark.parametrize(
    ("interval", "frequency", "factor"),
    [*(("step", frequency, factor) for frequency in (1, 2, 3) for factor in (1, 2)), ("epoch", 2, 1), ("epoch", 3, 2)],
)
def test_schedules_of_the_learning_rate(interval: str, frequency: int, factor: int) -> None:
    """As in stock Lightning, whose batches these are: a frequency by step is tested against the number of the batch."""

    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            config = {"scheduler": schedule, "interval": interval, "frequency": frequency}
            return {"optimizer": optimizer, "lr_scheduler": config}

    rates = []
    for callbacks in ((), (in_step(BATCH),), (in_step(3),)):
        _, watch, _ = watched(*callbacks, module=Scheduled(), max_epochs=4, accumulate_grad_batches=factor)
        rates.append(watch.rates)
    assert rates[0] == rates[1] == rates[2]
    steps = len(cut(range(SAMPLES), BATCH * factor))
    if interval == "epoch" or factor == 1:
        drops = 4 * (steps // frequency) if interval == "step" else 4 // frequency
        assert rates[2][-1] == pytest.approx(0.1 * 0.5**drops)


def test_checkpoints_by_step(tmp_path: Any) -> None:
    """After the same steps, with the same weights."""
    found = []
    for name, callbacks in (("stock", ()), ("ours", (in_step(3),))):
        checkpoint = ModelCheckpoint(tmp_path / name, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        fit(loader(), *callbacks, checkpoint, enable_checkpointing=True)
        paths = sorted((tmp_path / name).iterdir())
        found.append({path.name: torch.load(path, weights_only=True) for path in paths})
    assert found[0].keys() == found[1].keys() == {"step=4.ckpt", "step=8.ckpt", "step=12.ckpt"}
    for stock, ours in zip(found[0].values(), found[1].values()):
        close(ours["state_dict"], stock["state_dict"], 1e-12)
        loops = [state["loops"]["fit_loop"]["epoch_loop.batch_progress"] for state in (ours, stock)]
        assert loops[0] == loops[1]


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


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
def test_half_precision(precision: str) -> None:
    """Within the rounding of a batch, and a scaler that does not overflow ends at the same scale."""
    weights, scales = [], []
    for callbacks in ((), (in_step(3),)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        extra = {"plugins": plugin} if precision == "16-mixed" else {"precision": precision}
        data = DataLoader(Samples(SAMPLES, torch.float32), batch_size=BATCH)
        module, _ = fit(data, *callbacks, module=Regression(dtype=torch.float32), **extra)
        weights.append([parameter.detach().float() for parameter in module.parameters()])
        scales.append(scaler.get_scale())
    torch.testing.assert_close(weights[1], weights[0], rtol=5e-2, atol=5e-3)
    assert scales[0] == scales[1]


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
