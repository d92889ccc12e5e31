"""ResNet-34-D on CIFAR-10 with Adam: 32 samples to a step, whole and as 4 × 8, by BatchNorm and by GroupNorm."""

import copy
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from examples.reproduce import data
from examples.reproduce.command_line import built, curve, trained
from examples.reproduce.pictures import losses
from examples.reproduce.recipe import Column, Curve, Measured, Result, Setup, Task
from examples.reproduce.windows import MIB, cut_text, evaluated, window_peak
from lightning_ga.models import build_timm, to_group_norm

NAME = "cifar10_resnet34d"
TITLE = "CIFAR-10, resnet34d: 32 as 4 × 8"
COLUMNS = {
    "micro_batches": Column("micro-batches"),
    "error": Column("gradient error", "{:.0e}"),
    "train": Column("train loss", "{:.3f}"),
    "val": Column("val loss", "{:.3f}"),
    "logged": Column("val loss as logged", "{:.3f}"),
    "accuracy": Column("val accuracy", "{:.3f}"),
    "logged_accuracy": Column("as logged", "{:.3f}"),
    "peak": Column("peak MiB", "{:.0f}"),
}
WHOLE, CUT, USUAL = "32 whole", "8 × 4", "8 × 4, the usual script"
GROUP_WHOLE, GROUP_CUT = "GroupNorm, 32 whole", "GroupNorm, 8 × 4"
REFERENCE, LARGER = "resnet34d", ("vit_small_patch16_224", "convnext_tiny")
WINDOW, LARGE_IMAGE = 32, 96


def data_used(setup: Setup) -> str:
    """Name the set that is at hand."""
    return data.described(setup.data, at_hand(setup), train=trained_on(setup))


def at_hand(setup: Setup) -> str:
    """Find CIFAR-10, or what stands in for it."""
    return data.first_at_hand(setup.data, "cifar10", "fashion_mnist")


def trained_on(setup: Setup) -> int | None:
    """Choose the number of training images; the full recipe takes all."""
    return setup.pick(quick=320, medium=1280, full=None)


def rows(setup: Setup) -> list[Task]:
    """List five trainings, and three models in one budget of memory."""
    epochs = setup.pick(quick=2, medium=4, full=10)
    validated = setup.pick(quick=4, medium=8, full=None)
    limits = [] if validated is None else [f"trainer.limit_val_batches={validated}"]
    common = [
        *data.subset(setup.data, at_hand(setup), train=trained_on(setup)),
        *("data.image_size=32", f"trainer.max_epochs={epochs}", *limits, "lr_scheduler=none", "test=false"),
    ]
    whole, cut = ([f"experiment={name}", *common] for name in (NAME, f"{NAME}_8x4"))
    group = ["model.group_norm=true"]
    return [
        by_command(WHOLE, whole),
        by_command(CUT, cut),
        Task(USUAL, {"overrides": cut}, partial(usual, overrides=cut, epochs=epochs, validated=validated)),
        by_command(GROUP_WHOLE, [*whole, *group]),
        by_command(GROUP_CUT, [*cut, *group]),
        reference(setup),
        *(larger(name, setup) for name in LARGER),
    ]


def by_command(name: str, overrides: list[str]) -> Task:
    """Train with the command line."""
    return Task(name, {"overrides": overrides}, partial(ours, overrides=overrides))


def ours(folder: Path, overrides: list[str]) -> Measured:
    """Read what a training of the command line has left."""
    run = trained(folder, overrides)
    chunks = run.plan["plan"]["chunks"][0]
    exactness = run.plan.get("exactness") or {}
    settings = run.settings
    net = build_timm(settings["model.name"], num_classes=10, in_chans=settings["data.channels"])
    net = to_group_norm(net) if settings["model.group_norm"] else net
    last = {name: points[-1][1] for name, points in run.curves.items()}
    values = {
        "micro_batches": cut_text(chunks),
        "error": exactness.get("relative_error") if len(chunks) > 1 else None,
        "train": last["train/loss"],
        "val": last["val/loss"],
        "accuracy": last["val/acc"],
        "peak": window_peak(net, torch.optim.Adam, chunks, (settings["data.channels"], 32, 32)),
    }
    return Measured(values, {"train": curve(run, "train/loss"), "val": curve(run, "val/loss")})


def usual(_folder: Path, overrides: list[str], epochs: int, validated: int | None) -> Measured:
    """Train with the loop that is usually written, and measure rightly beside what it logs.

    Args:
        _folder: Unused.
        overrides: Of the command line, for the same data and model.
        epochs: Passes over the data.
        validated: Validation batches; ``None`` takes all.
    """
    fit, factor = built(overrides), 4
    loader, val = fit.data.train_dataloader(), list(islice(fit.data.val_dataloader(), validated))
    net = fit.module.net
    optimizer = fit.module.make_optimizer(net.parameters())
    curves: dict[str, Curve] = {"train": [], "val": [], "logged": []}
    step = 0
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = cross_entropy(net(inputs), targets) / factor
            loss.backward()
            if number % factor == 0:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                curves["train"].append((step, loss.item() * factor))
        right, accuracy = evaluated(copy.deepcopy(net).eval(), val)
        logged = loss.item() * factor  # the last training batch's: nothing sets it in the loop over validation data
        logged_accuracy = evaluated(net, val)[1]  # in training mode, as nothing calls net.eval()
        curves["val"].append((step, right))
        curves["logged"].append((step, logged))
    values = {
        "micro_batches": cut_text([8] * factor),
        "train": curves["train"][-1][1],
        "val": right,
        "logged": logged,
        "accuracy": accuracy,
        "logged_accuracy": logged_accuracy,
    }
    return Measured(values, curves)


def reference(setup: Setup) -> Task:
    """Measure what resnet34d takes for a whole window of larger images."""
    settings = {"image": LARGE_IMAGE, "window": WINDOW, "data": at_hand(setup)}
    return Task(f"{LARGE_IMAGE} px: resnet34d", settings, partial(whole_window, channels=channels(setup)))


def larger(name: str, setup: Setup) -> Task:
    """Let the probe find what another model can do in that memory."""
    settings = {"image": LARGE_IMAGE, "window": WINDOW, "data": at_hand(setup), "model": name}
    return Task(
        f"{LARGE_IMAGE} px: {name.removesuffix('_patch16_224')}",
        settings,
        partial(in_budget, name=name, data=at_hand(setup), channels=channels(setup)),
    )


def channels(setup: Setup) -> int:
    """Count the channels of an image: colour or grey."""
    return 3 if at_hand(setup) == "cifar10" else 1


def large_peak(name: str, chunks: list[int], channels: int, **budget: int) -> float:
    """Measure the peak of a window of large images, in MiB."""
    net = build_timm(name, image_size=LARGE_IMAGE, num_classes=10, in_chans=channels)
    return window_peak(net, torch.optim.Adam, chunks, (channels, LARGE_IMAGE, LARGE_IMAGE), **budget)


def whole_window(_folder: Path, channels: int) -> Measured:
    """Measure resnet34d's whole window."""
    return Measured({"micro_batches": cut_text([WINDOW]), "peak": large_peak(REFERENCE, [WINDOW], channels)})


def in_budget(folder: Path, name: str, data: str, channels: int) -> Measured:
    """Probe a model within resnet34d's memory, and train windows of what was found, in that memory.

    Args:
        folder: Of the run.
        name: The model.
        data: The set.
        channels: Of an image.
    """
    budget = int(large_peak(REFERENCE, [WINDOW], channels) * MIB)
    overrides = [f"experiment={NAME}", f"data={data}", f"data.image_size={LARGE_IMAGE}", f"model.name={name}"]
    probe = [f"accumulate.memory_budget={budget}", "accumulate.micro_batch_size=auto", "dry_run=true"]
    plan = trained(folder, [*overrides, *probe]).plan
    chunks = plan["plan"]["chunks"][0]
    exactness = plan.get("exactness") or {}
    peak = large_peak(name, chunks, channels, budget=budget)  # an OutOfMemoryError if it did not hold
    return Measured({"micro_batches": cut_text(chunks), "error": exactness.get("relative_error"), "peak": peak})


def draw(result: Result) -> Figure:
    """Draw losses: whole beside cut, the usual script's beside the right one."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    losses(left, result, {WHOLE: "C0", CUT: "C1"}, "BatchNorm")
    losses(middle, result, {GROUP_WHOLE: "C0", GROUP_CUT: "C1"}, "GroupNorm: the same gradients")
    losses(right, result, {USUAL: "C1"}, "The usual script", logged="C3")
    return figure
