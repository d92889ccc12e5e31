"""A batch that grows where a recipe lowers its learning rate: the same accuracy in about half the optimizer steps."""

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.reproduce import data
from examples.reproduce.command_line import curve, trained
from examples.reproduce.pictures import moving_mean
from examples.reproduce.recipe import Column, Measured, Result, Setup, Task

NAME = "batch_growth"
TITLE = "A batch that grows instead of a learning rate that falls"
COLUMNS = {
    "steps": Column("optimizer steps", "{:,.0f}"),
    "loss": Column("test loss", "{:.4f}"),
    "accuracy": Column("test accuracy", "{:.3f}"),
}
EPOCHS, MILESTONES, BATCH = 9, [4, 7], 16
DECAY = [
    *("lr_scheduler=step", "~lr_scheduler.step_size", "lr_scheduler.gamma=0.2"),
    "lr_scheduler._target_=torch.optim.lr_scheduler.MultiStepLR",
]
GROWTH = "{_target_: lightning_ga.schedule.from_lr_decay, batch: 16, milestones: [4, 7], gamma: 0.2}"
DECAYS = "learning rate ÷ 5 at epochs 4 and 7"
PROGRAMS = {
    DECAYS: [*DECAY, f"accumulate.effective_batch_size={BATCH}"],
    "batch × 5 at epochs 4 and 7": ["lr_scheduler=none", f"accumulate.effective_batch_size={GROWTH}"],
    "constant": ["lr_scheduler=none", f"accumulate.effective_batch_size={BATCH}"],
}


def pictures(setup: Setup) -> dict[str, Any]:
    """Choose the set, and how many pictures to train on."""
    name = data.first_at_hand(setup.data, "fashion_mnist")
    return {"name": name, "train": setup.pick(quick=2000, medium=12_000, full=None)}


def data_used(setup: Setup) -> str:
    """Name the pictures."""
    return data.described(setup.data, **pictures(setup))


def rows(setup: Setup) -> list[Task]:
    """List the recipe, the schedule and a control."""
    shared = [
        *("model=mlp", "model.hidden=[128]", "optimizer=sgd", "optimizer.lr=0.02", f"trainer.max_epochs={EPOCHS}"),
        *(f"data.batch_size={BATCH}", f"accumulate.micro_batch_size={BATCH}", "trainer.limit_val_batches=0"),
        *data.subset(setup.data, **pictures(setup)),
    ]
    steps = -(-data.trained_on(setup.data, **pictures(setup)) // BATCH)  # of an epoch: schedulers count steps
    milestones = f"+lr_scheduler.milestones=[{','.join(str(steps * epoch) for epoch in MILESTONES)}]"
    tasks = {name: [*shared, *overrides] for name, overrides in PROGRAMS.items()}
    tasks[DECAYS].append(milestones)
    return [Task(name, {"overrides": each}, partial(measure, each)) for name, each in tasks.items()]


def measure(overrides: list[str], folder: Path) -> Measured:
    """Train with the command line."""
    run = trained(folder, overrides)
    losses = curve(run, "train/loss")
    values = {"steps": losses[-1][0], "loss": run.result["test/loss"], "accuracy": run.result["test/acc"]}
    return Measured(values, {"train": moving_mean(losses, share=200 / len(losses))})


def draw(result: Result) -> Figure:
    """Draw the training losses by optimizer step."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="optimizer step", ylabel="training loss", yscale="log", title="the same samples; means of 200 steps"
    )
    for row in result.rows:
        axes.plot(*zip(*row.curves["train"]), label=row.name)
    axes.legend()
    return figure
