"""Mixed precision in windows of 16 × 2 with a report per class; and what each micro-batch weighs in its window."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from examples.reproduce import data
from examples.reproduce.command_line import built, curve, trained
from examples.reproduce.gradients import GradientWatch, flat_gradient, relative_error
from examples.reproduce.recipe import Column, Measured, Result, Setup, Task
from lightning_ga import AutoAccumulate

NAME = "mixed_precision"
TITLE = "Mixed precision, 16 × 2: what each micro-batch weighs"
COLUMNS = {
    "accuracy": Column("test accuracy", "{:.3f}"),
    "macro": Column("macro F1", "{:.3f}"),
    "weighted": Column("weighted F1", "{:.3f}"),
    "first": Column("a sample weighs: first", "{:.3f}"),
    "last": Column("last", "{:.3f}"),
    "spread": Column("difference", "{:.1e}"),
    "error": Column("gradient error", "{:.1e}"),
}
ON_CPU = "{_target_: lightning.pytorch.plugins.MixedPrecision, precision: 16-mixed, device: cpu}"
PRECISIONS = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16-mixed"],
    "fp16, gradient scaling": ["trainer.precision=null", f"+trainer.plugins=[{ON_CPU}]"],  # a GPU: fp16-mixed
}
TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE, TOO_HIGH = 2.0**10, 2.0**40
MICRO_BATCH, SIDE = 16, 28


@dataclass(frozen=True, slots=True)
class Window:
    """One window, and who accumulates it.

    Attributes:
        sizes: Samples of the recipe's batches.
        precision: A key of ``TYPES``.
        ours: Whether ``AutoAccumulate`` is there; stock Lightning otherwise.
        skipped: Batches for which ``training_step`` returns ``None``.
        norm: ``"group"`` or ``"batch"``.
        scale: What the loss is multiplied by in fp16.
    """

    sizes: Sequence[int] = (16, 16)
    precision: str = "fp32"
    ours: bool = True
    skipped: Sequence[int] = ()
    norm: str = "group"
    scale: float = SCALE


WINDOWS = {
    **{f"{name}: 16 × 2": Window(precision=name) for name in TYPES},
    "fp32: 4 × 8": Window(sizes=(4,) * 8),
    "last batch of 4, stock Lightning": Window(sizes=(16, 4), ours=False),
    "last batch of 4": Window(sizes=(16, 4)),
    "first batch skipped, stock Lightning": Window(ours=False, skipped=[0]),
    "first batch skipped": Window(skipped=[0]),
    "fp16: overflow, the step is skipped": Window(precision="fp16", scale=TOO_HIGH),
    "BatchNorm: 16 × 2": Window(norm="batch"),
}
UNSCALED, RUNNING = "fp16 by hand: unscale_ in each batch", "BatchNorm's running mean: 4 × 8"


def data_used(setup: Setup) -> str:
    """Name the set that is at hand."""
    return data.described(setup.data, at_hand(setup), train=trained_on(setup))


def at_hand(setup: Setup) -> str:
    """Find MNIST or Fashion-MNIST, or what stands in for them."""
    return data.first_at_hand(setup.data, "fashion_mnist", "mnist")


def trained_on(setup: Setup) -> int | None:
    """Choose the number of training images; the full recipe takes all."""
    return setup.pick(quick=1600, medium=12_800, full=None)


def rows(setup: Setup) -> list[Task]:
    """List three trainings of the command line, then single windows."""
    chosen = data.subset(setup.data, at_hand(setup), train=trained_on(setup))
    common = [
        *("experiment=mixed_precision_16x2", "trainer=cpu", *chosen, "model=mlp", f"data.image_size={SIDE}"),
        *(f"trainer.max_epochs={setup.pick(quick=1, medium=3, full=5)}", "trainer.limit_val_batches=16"),
    ]
    trainings = {f"{name}: training": [*common, *precision] for name, precision in PRECISIONS.items()}
    some = partial(samples, overrides=common)
    return [
        *(Task(name, {"overrides": line}, partial(training, overrides=line)) for name, line in trainings.items()),
        *(Task(name, {"window": repr(one)}, partial(window, one, some)) for name, one in WINDOWS.items()),
        Task(UNSCALED, {"scale": SCALE}, partial(unscaled_each_time, some)),
        Task(RUNNING, {"sizes": [4] * 8}, partial(running_mean, some)),
    ]


def training(folder: Path, overrides: Sequence[str]) -> Measured:
    """Train with the command line, and read its classification report."""
    run = trained(folder, overrides)
    scores = {name: score["f1-score"] for name, score in run.scores.items() if name != "accuracy"}
    macro, weighted = scores.pop("macro avg"), scores.pop("weighted avg")
    values = {"accuracy": run.result["test/acc"], "macro": macro, "weighted": weighted}
    return Measured(values, {"train": curve(run, "train/loss"), "f1": list(enumerate(scores.values()))})


def samples(overrides: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Load 64 training images and their classes."""
    dataset = built(overrides).data.train_dataloader().dataset
    images, classes = zip(*(dataset[place] for place in range(64)))
    return torch.stack(images), torch.tensor(classes)


def network(norm: str) -> nn.Sequential:
    """Build a perceptron with a normalization; the same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.BatchNorm1d(64) if norm == "batch" else nn.GroupNorm(1, 64)
        return nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 64), layer, nn.ReLU(), nn.Linear(64, 10))


class Watched(LightningModule):
    """Keeps the micro-batches that it is given; its weights stay as they are."""

    def __init__(self, one: Window) -> None:
        super().__init__()
        self.net = network(one.norm)
        self.skipped = one.skipped
        self.batches: list[list[Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx in self.skipped:
            return None
        self.batches.append(batch)
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def window(one: Window, some: partial[tuple[Tensor, Tensor]], _folder: Path) -> Measured:
    """Train one window with a real Trainer, and find what each micro-batch weighs in its step."""
    images, classes = (part[: sum(one.sizes)] for part in some())
    module, watch = Watched(one), GradientWatch()
    ours = [AutoAccumulate(micro_batch_size=max(one.sizes), verify=False)] if one.ours else []
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=len(one.sizes),
        callbacks=[*ours, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **in_precision(one),
    )
    trainer.fit(module, DataLoader(TensorDataset(images, classes), batch_size=max(one.sizes)))
    if not watch.gradients:
        return Measured({"first": 0.0, "last": 0.0}, {"weights": [(place, 0.0) for place in range(len(one.sizes))]})
    module.train()
    parts = [gradient(module.net, batch, one) for batch in module.batches]
    whole = gradient(module.net, [torch.cat(side) for side in zip(*module.batches)], one)
    found = shares(watch.gradients[0], parts, [len(batch[1]) for batch in module.batches])
    return weighed(found, relative_error(watch.gradients[0], whole))


def in_precision(one: Window) -> dict[str, object]:
    """Choose the Trainer's arguments for a precision; Lightning has no fp16 on the CPU but by a plugin."""
    if one.precision == "fp16":
        return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=one.scale))}
    return {"precision": {"fp32": "32-true", "bf16": "bf16-mixed"}[one.precision]}


def gradient(net: nn.Module, batch: Sequence[Tensor], one: Window) -> Tensor:
    """Compute the gradient of a batch's mean loss as one vector, in the precision of a window."""
    dtype = TYPES[one.precision]
    net.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = cross_entropy(net(batch[0]), batch[1])
    scale = one.scale if one.precision == "fp16" else 1.0
    (loss * scale).backward()
    return flat_gradient(net) / scale


def shares(total: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[float]:
    """Find what a sample of each part weighs in a total, as a multiple of what all would weigh in the mean.

    Args:
        total: A vector: the sum of the parts, each times a weight that is looked for.
        parts: For each micro-batch, the mean over its samples.
        sizes: Samples of each.
    """
    weights = torch.linalg.lstsq(torch.stack(list(parts), dim=1), total.unsqueeze(1)).solution.flatten()
    return [float(weight) * sum(sizes) / size for weight, size in zip(weights, sizes)]


def weighed(found: Sequence[float], error: float | None = None) -> Measured:
    """Put what samples weigh into a row."""
    values = {"first": found[0], "last": found[-1], "spread": max(found) - min(found)}
    return Measured(values | ({} if error is None else {"error": error}), {"weights": list(enumerate(found))})


def unscaled_each_time(some: partial[tuple[Tensor, Tensor]], _folder: Path) -> Measured:
    """Accumulate by hand, and unscale for clipping in each micro-batch: earlier ones are divided again and again."""
    one = Window(precision="fp16")
    net, batches = network(one.norm), list(zip(*(part.split(MICRO_BATCH)[:2] for part in some())))
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=SCALE)
    for images, classes in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(net(images), classes) / len(batches)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1e6)
        scaler.update()  # without it, unscale_ refuses to be called again
    total = flat_gradient(net)
    parts = [gradient(net, batch, one) for batch in batches]
    return weighed(shares(total, parts, [MICRO_BATCH] * 2), relative_error(total, sum(parts) / 2))


def running_mean(some: partial[tuple[Tensor, Tensor]], _folder: Path) -> Measured:
    """Find what each micro-batch weighs in BatchNorm's running mean."""
    net, batches = network("batch"), some()[0][:32].split(4)
    layer = net[2]
    with torch.no_grad():
        for images in batches:
            net(images)
        means = [net[:2](images).mean(dim=0).double() for images in batches]
    found = shares(layer.running_mean.double(), means, [4] * 8)
    mean = sum(found) / len(found)  # the value that it began with has the rest
    return weighed([weight / mean for weight in found])


def draw(result: Result) -> Figure:
    """Draw F1 by class and precision, and what micro-batches weigh."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    scores, weights = figure.subplots(1, 2, width_ratios=(1, 1.3))
    for place, name in enumerate(PRECISIONS):
        points = result.row(f"{name}: training").curves["f1"]
        scores.bar([x + 0.28 * (place - 1) for x, _ in points], [y for _, y in points], 0.26, label=name.split(",")[0])
    scores.set(title="F1 by class", xlabel="class", ylim=(0, 1.25))
    scores.set_xticks(range(len(points)))
    scores.legend(frameon=False, fontsize="small", loc="upper center", ncols=3)
    draw_weights(weights, result)
    for axes in (scores, weights):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_weights(axes: Axes, result: Result) -> None:
    """Draw what a sample of each micro-batch weighs, a row of bars for each window."""
    names = [row.name for row in result.rows if "weights" in row.curves]
    for place, name in enumerate(names):
        found = [weight for _, weight in result.row(name).curves["weights"]]
        height = 0.8 / len(found)
        for number, weight in enumerate(found):
            shade = 0.35 + 0.65 * number / max(1, len(found) - 1)
            axes.barh(place - 0.4 + (number + 0.5) * height, weight, 0.9 * height, color="C0", alpha=shade)
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set(title="What a sample of each micro-batch weighs", xlabel="1: as in the mean over the window; first on top")
