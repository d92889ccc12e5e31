"""A loop by hand with summaries, checkpoints and a start step: plain, with Fabric, resumed, and as usually cut."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate

from examples.custom_loop import Config, Training, train
from examples.reproduce import data
from examples.reproduce.command_line import built, curve, trained
from examples.reproduce.pictures import losses
from examples.reproduce.recipe import Column, Curve, Measured, Result, Setup, Task, Value
from examples.reproduce.windows import MIB, NO_LIMIT, Batch, cut_text, evaluated
from lightning_ga.models import HashedPatchClassifier
from lightning_ga.testing import limit_memory

NAME = "custom_loop"
TITLE = "A custom loop, and an embedding with sparse gradients"
COLUMNS = {
    "micro_batches": Column("micro-batches"),
    "steps": Column("steps", "{:,}"),
    "used": Column("samples an epoch", "{:,}"),
    "error": Column("gradient error", "{:.0e}"),
    "gradient": Column("gradient MiB", "{:.1f}"),
    "peak": Column("peak MiB", "{:.0f}"),
    "loss": Column("val loss", "{:.4f}"),
    "accuracy": Column("val accuracy", "{:.3f}"),
    "difference": Column("weights differ by", "{:g}"),
}
WHOLE, PLAIN, FABRIC = "plain PyTorch, 256 whole", "plain PyTorch, what fits", "Fabric, what fits"
TRAINER, RESUMED = "AutoAccumulate(), what fits", "killed and resumed"
DENSE, USUAL = "dense gradients", "the usual script"
BUDGET = "112MiB"
TRAINER_BUDGET = "120MiB"  # its probe has room for the most rows that a window may touch
WINDOW, BATCH, FACTOR = 256, 64, 4
GRADIENT = "gradient.json"


class Images(NamedTuple):
    """All images that are trained on, and batches to validate on."""

    images: Tensor
    labels: Tensor
    val: Sequence[Batch]


def data_used(setup: Setup) -> str:
    """Name the set that is at hand."""
    return data.described(setup.data, at_hand(setup), train=trained_on(setup))


def at_hand(setup: Setup) -> str:
    """Find Fashion-MNIST, or what stands in for it."""
    return data.first_at_hand(setup.data, "fashion_mnist")


def trained_on(setup: Setup) -> int | None:
    """Choose the number of training images: no multiple of a window."""
    return setup.pick(quick=1180, medium=12200, full=None)


def rows(setup: Setup) -> list[Task]:
    """List the same training by several programs."""
    epochs = setup.pick(quick=2, medium=3, full=5)
    limit = setup.pick(quick=16, medium=64, full=None)
    overrides = ["experiment=sparse_embedding", *data.subset(setup.data, at_hand(setup), train=trained_on(setup))]
    limits = [f"trainer.max_epochs={epochs}", *([] if limit is None else [f"trainer.limit_val_batches={limit}"])]
    command = [*overrides, *limits, f"accumulate.memory_budget={TRAINER_BUDGET}", "test=false"]
    settings = {"overrides": overrides, "epochs": epochs, "limit": limit}
    config = Config(memory_budget=BUDGET)
    cut = replace(config, micro_batch_size=BATCH)

    def task(name: str, measure: Callable[..., Measured], config: Config | None = None, **more: Any) -> Task:
        given = {"config": config, **more} if config is not None else more
        plain = {"config": asdict(config), **more} if config is not None else more
        return Task(name, {**settings, **plain}, partial(measure, **settings, **given))

    return [
        task(WHOLE, by_loop, replace(config, micro_batch_size=WINDOW)),
        task(PLAIN, by_loop, config),
        task(FABRIC, by_loop, config, with_fabric=True),
        Task(TRAINER, {"overrides": command}, partial(by_trainer, overrides=command)),
        task(RESUMED, resumed, cut),
        task(DENSE, by_loop, replace(cut, sparse=False)),
        task(USUAL, usual),
    ]


@cache
def load(overrides: tuple[str, ...], limit: int | None) -> Images:
    """Read the images that the command line trains and validates on."""
    loaders = built(overrides).data
    images, labels = default_collate(list(loaders.train_dataloader().dataset))
    return Images(images, labels, list(islice(loaders.val_dataloader(), limit)))


class Watch:
    """Measures what the optimizer is given: called before each of its steps.

    Attributes:
        sizes: Micro-batches of the first window.
        used: Samples trained on.
        gradient: Most bytes of a gradient.
        error: Relative error of the first window's gradient to that of one pass.
    """

    def __init__(self, images: Images) -> None:
        self._images = images
        self.sizes: list[int] = []
        self.used, self.gradient, self.error = 0, 0, 0.0

    def __call__(self, training: Training, chunks: Sequence[Tensor]) -> None:
        self.used += sum(map(len, chunks))
        self.gradient = max(self.gradient, gradient_bytes(training.model))
        if not self.sizes:
            self.sizes = [len(chunk) for chunk in chunks]
            self.error = gradient_error(training.model, self._images, torch.cat(list(chunks)))


def by_loop(
    folder: Path, overrides: list[str], epochs: int, limit: int | None, config: Config, with_fabric: bool = False
) -> Measured:
    """Train with the loop of ``examples/custom_loop.py``.

    Args:
        folder: For summaries and checkpoints.
        overrides: Of the command line, for the same data.
        epochs: Passes over the data.
        limit: Validation batches; ``None`` takes all.
        config: The loop's, but for steps and folder.
        with_fabric: Whether Fabric runs the model.
    """
    images = load(tuple(overrides), limit)
    config = replace(config, steps=epochs * epoch_steps(images), folder=str(folder / "loop"))
    watch = Watch(images)
    training = train(config, images.images, images.labels, fabric=fabric_or_none(with_fabric), watch=watch)
    first = replace(config, steps=3, micro_batch_size=watch.sizes[0], folder=str(folder / "first"))
    with limit_memory(NO_LIMIT) as memory:
        train(first, images.images, images.labels, fabric=fabric_or_none(with_fabric))
    values = {
        "micro_batches": cut_text(watch.sizes),
        "used": watch.used // epochs,
        "error": watch.error,
        "gradient": watch.gradient / MIB,
        "peak": memory.peak_bytes / MIB,
    }
    return Measured(values | reached(training, images), {"train": summarized(Path(config.folder))})


def fabric_or_none(wanted: bool) -> Fabric | None:
    """Make a Fabric for one CPU."""
    return Fabric(accelerator="cpu", devices=1) if wanted else None


def epoch_steps(images: Images) -> int:
    """Count the windows of an epoch, the ragged one too."""
    return -(-len(images.labels) // WINDOW)


def reached(training: Training, images: Images) -> dict[str, Value]:
    """Measure a trained model."""
    loss, accuracy = evaluated(training.model.eval(), images.val)
    return {"steps": training.step, "loss": loss, "accuracy": accuracy}


def summarized(folder: Path) -> Curve:
    """Read the loss by optimizer step from a run's summaries."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def gradient_bytes(model: nn.Module) -> int:
    """Count the bytes of gradients: of a sparse one, its values and the numbers of its rows."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    parts = [(g._values(), g._indices()) if g.is_sparse else (g,) for g in gradients]
    return sum(tensor.nbytes for part in parts for tensor in part)


def gradient_error(model: nn.Module, images: Images, window: Tensor) -> float:
    """Compare the accumulated gradient with that of one pass."""
    parameters = list(model.parameters())
    loss = cross_entropy(model(images.images[window]), images.labels[window])
    pairs = list(zip(parameters, torch.autograd.grad(loss, parameters)))
    dense = [(dense_of(parameter.grad), dense_of(whole)) for parameter, whole in pairs]
    distance = sum(float((found - whole).square().sum()) for found, whole in dense)
    return (distance / sum(float(whole.square().sum()) for _, whole in dense)) ** 0.5


def dense_of(gradient: Tensor) -> Tensor:
    """Write a sparse gradient out."""
    return gradient.to_dense() if gradient.is_sparse else gradient


class KilledError(Exception):
    """Ends a training in the middle of a step."""


def resumed(folder: Path, overrides: list[str], epochs: int, limit: int | None, config: Config) -> Measured:
    """End a training between two checkpoints, go on with it, and compare it with one that was not ended.

    Args:
        folder: For summaries and checkpoints.
        overrides: Of the command line, for the same data.
        epochs: Passes over the data.
        limit: Validation batches; ``None`` takes all.
        config: The loop's, but for steps and folder.
    """
    images = load(tuple(overrides), limit)
    steps = epochs * epoch_steps(images)
    config = replace(config, steps=steps, checkpoint_every=max(2, steps // 4), folder=str(folder / "ended"))

    def kill(training: Training, _chunks: Sequence[Tensor]) -> None:
        if training.step == steps // 2 + 1:
            raise KilledError

    with suppress(KilledError):
        train(config, images.images, images.labels, watch=kill)
    training = train(config, images.images, images.labels)
    through = train(replace(config, folder=str(folder / "through")), images.images, images.labels)
    pairs = zip(training.model.parameters(), through.model.parameters())
    difference = max(float((one - other).detach().abs().max()) for one, other in pairs)
    curves = {"train": summarized(Path(config.folder))}
    return Measured(reached(training, images) | {"difference": difference, "steps": len(curves["train"])}, curves)


class GradientBytes(Callback):
    """Writes the most bytes of a gradient that the optimizer was given."""

    def __init__(self) -> None:
        self._bytes = 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._bytes = max(self._bytes, gradient_bytes(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (Path(trainer.default_root_dir) / GRADIENT).write_text(json.dumps(self._bytes))


def by_trainer(folder: Path, overrides: list[str]) -> Measured:
    """Train the same with the command line."""
    watch = f"+callbacks.gradient._target_={GradientBytes.__module__}.{GradientBytes.__name__}"
    run = trained(folder, [*overrides, watch])
    last = {name: points[-1][1] for name, points in run.curves.items()}
    samples = len(built(overrides).data.train_dataloader().dataset)
    values = {
        "micro_batches": cut_text(run.plan["plan"]["chunks"][0]),
        "steps": curve(run, "train/loss")[-1][0],
        "used": samples,
        "error": (run.plan["exactness"] or {}).get("relative_error"),
        "gradient": json.loads((run.folder / GRADIENT).read_text()) / MIB,
        "peak": run.plan["probe"]["peak_bytes"] / MIB,
        "loss": last["val/loss"],
        "accuracy": last["val/acc"],
    }
    return Measured(values, {"train": curve(run, "train/loss")})


def usual(_folder: Path, overrides: list[str], epochs: int, limit: int | None) -> Measured:
    """Train with the loop that is usually written: what is left at the end of an epoch is dropped.

    Args:
        _folder: Unused.
        overrides: Of the command line, for the same data.
        epochs: Passes over the data.
        limit: Validation batches; ``None`` takes all.
    """
    images = load(tuple(overrides), limit)
    torch.manual_seed(0)
    net = HashedPatchClassifier().net
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(images.images, images.labels), BATCH, shuffle=True)
    losses: list[float] = []
    gradient = used = 0
    for _ in range(epochs):
        optimizer.zero_grad()
        pending = 0
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = cross_entropy(net(inputs), targets)
            (loss / FACTOR).backward()
            pending += len(targets)
            if number % FACTOR == 0:
                gradient = max(gradient, gradient_bytes(net))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                used, pending = used + pending, 0
    values = {
        "micro_batches": cut_text([BATCH] * FACTOR),
        "used": used // epochs,
        "gradient": gradient / MIB,
        **reached(Training(net, optimizer, len(losses)), images),
    }
    return Measured(values, {"train": list(enumerate(losses, start=1))})


def draw(result: Result) -> Figure:
    """Draw the loss of the same training by three programs, and the bytes of its gradient."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    losses(left, result, {WHOLE: "C0", PLAIN: "C1", RESUMED: "C2"}, "Cut, or killed and resumed: the same training")
    draw_gradients(right, result)
    return figure


def draw_gradients(axes: Axes, result: Result) -> None:
    """Draw the bytes of a window's gradient, dense and sparse."""
    bars = {"dense": DENSE, "sparse, as it adds up": USUAL, "sparse, each row once": PLAIN}
    sizes = [float(result.row(name).values["gradient"] or 0) for name in bars.values()]
    drawn = axes.barh(list(bars), sizes, color=["C3", "C1", "C0"])
    axes.bar_label(drawn, [f"{size:.1f} MiB" for size in sizes], padding=4)
    axes.set(title=f"Gradient of a window of {WINDOW} samples", xlabel="MiB", xlim=(0, 1.3 * max(sizes)))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
