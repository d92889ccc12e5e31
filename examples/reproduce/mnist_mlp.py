"""The perceptron 784-512-256-128-10 in batches of 32, four of them to an optimizer step."""

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from examples.reproduce.command_line import trained
from examples.reproduce.data import SETS, first_at_hand
from examples.reproduce.recipe import Column, Measured, Result, Setup, Task

NAME = "mnist_mlp"
TITLE = "MNIST: four batches of 32 to a step"
COLUMNS = {
    "loss": Column("test loss", "{:.3f}"),
    "accuracy": Column("test accuracy", "{:.3f}"),
}


def data_used(setup: Setup) -> str:
    """Name the set that is at hand."""
    return SETS[first_at_hand(setup.data, "mnist", "fashion_mnist")][0]


def rows(setup: Setup) -> list[Task]:
    """List both trainings of the command line."""
    data = first_at_hand(setup.data, "mnist", "fashion_mnist")
    size = setup.pick(
        quick=["data.val_fraction=0.98", "trainer.limit_val_batches=16", "trainer.limit_test_batches=16"],
        medium=["data.val_fraction=0.9", "trainer.limit_val_batches=32"],
        full=[],
    )
    common = [f"data={data}", *([] if data == "digits" else [f"data.root={setup.data}"]), *size]
    runs = {"no accumulation": "mnist_mlp", "4 × 32": "mnist_mlp_accumulate4"}
    overrides = {name: [f"experiment={experiment}", *common] for name, experiment in runs.items()}
    return [
        Task(name, {"overrides": [o for o in line if not o.startswith("data.root=")]}, partial(ours, overrides=line))
        for name, line in overrides.items()
    ]


def ours(folder: Path, overrides: list[str]) -> Measured:
    """Train with the command line."""
    run = trained(folder, overrides)
    return Measured(
        {"loss": run.result["test/loss"], "accuracy": run.result["test/acc"]},
        {"train/loss": list(run.curves["train/loss"])},
    )


def draw(result: Result) -> Figure:
    """Draw the training loss."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row in result.rows:
        axes.plot(*zip(*row.curves["train/loss"]), label=row.name)
    axes.legend(frameon=False)
    return figure
