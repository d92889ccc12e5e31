"""A small GPT on English definitions of 6 to 431 characters: a micro-batch weighs as many tokens as it holds."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from examples.reproduce.command_line import built, curve, trained
from examples.reproduce.gradients import GradientWatch, relative_error
from examples.reproduce.pictures import moving_mean
from examples.reproduce.recipe import Column, Measured, Result, Setup, Task
from lightning_ga import AutoAccumulate
from lightning_ga.counters import TargetTokens
from lightning_ga.data.sets import pad
from lightning_ga.models import GPT

NAME = "language_model"
TITLE = "Definitions, a small GPT: token weights"
COLUMNS = {
    "full": Column("gradient error", "{:.1e}"),
    "ragged": Column("in the last window", "{:.1e}"),
    "train": Column("train loss", "{:.4f}"),
    "loss": Column("test loss", "{:.4f}"),
    "perplexity": Column("test perplexity", "{:.3f}"),
}
WINDOW, COMPARED, LEFT = 32, 4, 12  # texts of a window; windows whose gradients are compared; texts of the last one
WHOLE, BY_TOKENS, BY_LENGTH, NAIVE = "32 whole", "token weights", "by length", "mean of means"
COUNTED = "{_target_: lightning_ga.counters.TargetTokens}"
NORMALIZE = {BY_TOKENS: COUNTED, BY_LENGTH: COUNTED, NAIVE: "null"}


def data_used(setup: Setup) -> str:
    """Name the texts."""
    windows = trained_windows(setup)
    part = "" if windows is None else f" ({windows * WINDOW:,} of 19,660 training texts)"
    return f"timm's 21,844 English definitions{part}"


def trained_windows(setup: Setup) -> int | None:
    """Choose the windows of an epoch; the full recipe takes all."""
    return setup.pick(quick=20, medium=150, full=None)


def rows(setup: Setup) -> list[Task]:
    """List trainings over the same windows of texts."""
    cuts = [(8, BY_TOKENS), (8, NAIVE), (8, BY_LENGTH), (1, BY_TOKENS), (1, NAIVE)]
    named = {f"{micro} × {WINDOW // micro}, {kind}": (micro, kind) for micro, kind in cuts}
    return [task(name, *cut, setup) for name, cut in {WHOLE: (WINDOW, BY_TOKENS), **named}.items()]


def task(name: str, micro_batch: int, kind: str, setup: Setup) -> Task:
    """Train and compare gradients with micro-batches of so many texts."""
    factor = WINDOW // micro_batch
    fixed = ["accumulate.effective_batch_size=null", f"accumulate.accumulate={factor}", "accumulate.size_of=null"]
    overrides = [
        *("experiment=definitions_gpt", *size(setup, factor), *([] if kind == BY_LENGTH else fixed)),
        *(f"data.batch_size={micro_batch}", f"accumulate.normalize={NORMALIZE[kind]}"),
    ]
    return Task(name, {"overrides": overrides}, partial(measure, overrides=overrides, cut=(micro_batch, kind)))


def size(setup: Setup, factor: int) -> list[str]:
    """Choose model and length of the training; the full recipe is the experiment as it is."""
    windows = trained_windows(setup)
    if windows is None:
        return []
    evaluated = setup.pick(quick=4, medium=18, full=0)
    return [
        *("model.width=64", "model.depth=2", "model.heads=2", "trainer.max_epochs=1"),
        *(f"trainer.limit_train_batches={windows * factor}", f"trainer.limit_val_batches={evaluated}"),
        f"trainer.limit_test_batches={evaluated}",
    ]


def measure(folder: Path, overrides: Sequence[str], cut: tuple[int, str]) -> Measured:
    """Train with the command line, and compare gradients with those of whole windows."""
    run = trained(folder, overrides)
    right, found = gradients(overrides, (WINDOW, BY_TOKENS)), gradients(overrides, cut)
    errors = [relative_error(*pair) for pair in zip(found, right)]
    results = {name: run.result[f"{name}/loss"] for name in ("train", "test")}
    return Measured(
        {
            "full": max(errors[:-1]),
            "ragged": errors[-1],
            "train": results["train"],
            "loss": results["test"],
            "perplexity": run.result["test/perplexity"],
        },
        {"train": curve(run, "train/loss"), "error": list(enumerate(errors, 1))},
    )


def gradients(overrides: Sequence[str], cut: tuple[int, str]) -> list[Tensor]:
    """Record what the optimizer is given in each window of an epoch, all at the weights that training begins with.

    Args:
        overrides: Of the command line: the model and its texts.
        cut: Texts of a micro-batch, and how it is weighted.
    """
    micro_batch, kind = cut
    _, module, data = built(overrides)
    assert isinstance(module, GPT)
    module.make_optimizer, module.make_scheduler = partial(torch.optim.SGD, lr=0.0), None
    texts = Subset(data.train_dataloader().dataset, range(COMPARED * WINDOW + LEFT))
    normalize = None if kind == NAIVE else TargetTokens()
    size_of = "tokens" if kind == BY_LENGTH else None
    watch = GradientWatch()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=WINDOW // micro_batch,
        callbacks=[
            AutoAccumulate(micro_batch_size=micro_batch, normalize=normalize, size_of=size_of, verify=False),
            watch,
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, DataLoader(texts, batch_size=micro_batch, collate_fn=pad), data.val_dataloader())
    return watch.gradients


def draw(result: Result) -> Figure:
    """Draw the gradient error of each window, and how far training losses are from those of whole windows."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    errors, losses = figure.subplots(1, 2)
    whole = dict(result.row(WHOLE).curves["train"])
    for number, row in enumerate(row for row in result.rows if row.name != WHOLE):
        style = {"color": f"C{number}", "linestyle": "--" if NAIVE in row.name else "-"}
        apart = [(step, abs(loss - whole[step])) for step, loss in row.curves["train"]]
        errors.semilogy(*zip(*row.curves["error"]), marker="o", label=row.name, **style)
        losses.semilogy(*zip(*(point for point in moving_mean(apart) if point[1])), **style)
    errors.set(title="Error of the gradient", xlabel="window (the last has 12 texts)", ylabel="relative to the whole")
    errors.set_xticks(range(1, COMPARED + 2))
    losses.set(
        title="Training loss: distance from 32 whole", xlabel="optimizer step", ylabel="nats a token, moving mean"
    )
    for axes in (errors, losses):
        axes.spines[["top", "right"]].set_visible(False)
    errors.legend(frameon=False, fontsize="small", loc="center right")
    return figure
