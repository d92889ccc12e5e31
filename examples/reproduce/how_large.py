"""How large a batch: branches of a short run beside full runs, on digits and on clothes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from matplotlib.figure import Figure

from examples.reproduce.command_line import built, seeds_forgotten
from examples.reproduce.recipe import Column, Measured, Result, Setup, Task
from lightning_ga import AutoAccumulate, measure_batch_size
from lightning_ga.plan.critical_batch import BatchPoint, CriticalBatch

NAME = "how_large"
TITLE = "How large a batch: branches beside full runs"
BATCHES = {"digits": 64, "clothes": 256}  # of the run before the branches
RATIOS = {"B/2": 0.5, "B": 1, "2 B": 2, "4 B": 4}
COLUMNS = {
    "batch": Column("B", "{:.0f}"),
    **{name: Column(f"loss at {name}", "{}") for name in RATIOS},
    "largest": Column("verdict", "{:.0f}"),
}
TOLERANCE = 0.05
DIGITS, CLOTHES = "scikit-learn's digits", "Fashion-MNIST (6,000 of its pictures)"
MODEL = ["model=mlp", "model.hidden=[64]", "lr_scheduler=none"]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def data_used(setup: Setup) -> str:
    """Name the pictures."""
    return setup.pick(quick=DIGITS, medium=f"{DIGITS}, {CLOTHES}", full=f"{DIGITS}, {CLOTHES}")


def rows(setup: Setup) -> list[Task]:
    """List branches and full runs of each data set."""
    sets = {"digits": ["data=digits"]}
    if setup.scale != "quick":
        sets["clothes"] = ["data=fashion_mnist", "data.val_fraction=0.9"]
    length = {
        "before": setup.pick(quick=1, medium=1, full=2),  # epochs, of full runs too
        "epochs": setup.pick(quick=2, medium=5, full=20),  # of a branch
        "seeds": setup.pick(quick=2, medium=5, full=5),
    }
    tasks = []
    for name, overrides in sets.items():
        batch = BATCHES[name]
        settings = {"overrides": [*MODEL, f"data.batch_size={batch}", *overrides], "batch": batch, **length}
        tasks += [Task(f"{name}, {kind}", settings, partial(run, settings)) for kind, run in KINDS.items()]
    return tasks


def branches(settings: dict[str, Any], folder: Path) -> Measured:
    """Train a little, and branch from there."""
    make = partial(fresh, settings["overrides"])
    with seeds_forgotten():
        module, data = make()
        trainer = trained(module, data, settings["batch"], settings["before"], seed=0)
        trainer.save_checkpoint(folder / "a.ckpt")
        found = measure_batch_size(
            make,
            folder / "a.ckpt",
            batch=settings["batch"],
            samples=settings["epochs"] * len(data.train_dataloader().dataset),
            folder=folder,
            seeds=settings["seeds"],
            tolerance=TOLERANCE,
            tell=len,
            accelerator="cpu",
        )
    return shown(found, settings["batch"])


def full_runs(settings: dict[str, Any], _: Path) -> Measured:
    """Train from the start with each batch, on as many samples as a branch and the run before it."""
    points = []
    with seeds_forgotten():
        for size in sizes_of(settings["batch"]):
            losses = []
            for seed in range(settings["seeds"]):
                module, data = fresh(settings["overrides"])
                trained(module, data, size, settings["before"] + settings["epochs"], seed=seed)
                judged = Trainer(**QUIET).validate(module, datamodule=data, verbose=False)
                losses.append(float(judged[0]["val/loss"]))
            points.append(BatchPoint(size, tuple(losses)))
    return shown(CriticalBatch(tuple(points), TOLERANCE, 0), settings["batch"])


def sizes_of(batch: int) -> list[int]:
    """Return the batches that are compared: those of ``measure_batch_size``."""
    return [round(ratio * batch) for ratio in RATIOS.values()]


KINDS = {"branches": branches, "full runs": full_runs}


def fresh(overrides: Sequence[str]) -> tuple[LightningModule, LightningDataModule]:
    """Build a module and its data."""
    _, module, data = built(overrides)
    return module, data


def trained(module: LightningModule, data: LightningDataModule, batch: int, epochs: int, *, seed: int) -> Trainer:
    """Train with an effective batch, the learning rate scaled by its square root."""
    seed_everything(seed, workers=True, verbose=False)
    most = min(batch, data.train_dataloader().batch_size)
    callback = AutoAccumulate(batch, micro_batch_size=most, scale_lr="sqrt", verify=False)
    trainer = Trainer(**QUIET, max_epochs=epochs, limit_val_batches=0, callbacks=[callback])
    trainer.fit(module, datamodule=data)
    return trainer


def shown(found: CriticalBatch, batch: int) -> Measured:
    """Return the losses of each batch and the verdict."""
    cells = {name: f"{point.loss:.3f} ± {point.error:.3f}" for name, point in zip(RATIOS, found.points, strict=True)}
    curves = {
        "loss": [(float(point.batch), fmean(point.losses)) for point in found.points],
        "error": [(float(point.batch), stdev(point.losses) / len(point.losses) ** 0.5) for point in found.points],
        "bound": [(0.0, found.bound)],
    }
    return Measured({"batch": batch, **cells, "largest": found.largest}, curves)


def draw(result: Result) -> Figure:
    """Draw the losses by batch, branches beside full runs, with the bound of each."""
    names = list(dict.fromkeys(row.name.split(",")[0] for row in result.rows))
    figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        for number, kind in enumerate(KINDS):
            row = result.row(f"{name}, {kind}")
            batches, losses = zip(*row.curves["loss"])
            errors = [error for _, error in row.curves["error"]]
            axes.errorbar(batches, losses, errors, marker="o", capsize=3, color=f"C{number}", label=kind)
            axes.axhline(row.curves["bound"][0][1], color=f"C{number}", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [f"{size:.0f}" for size in batches])
        axes.set(xlabel="effective batch", ylabel="validation loss", title=f"{name}; dotted: 5 % above the lowest")
        axes.legend()
    return figure
