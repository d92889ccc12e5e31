"""Do batches that grow train as well in fewer steps? ``python -m benchmarks.schedules``.

Smith et al. (arXiv 1711.00489) on Fashion-MNIST, in the folder ``--data``: a decaying learning rate against a growing
batch, and a constant control. Seesaw (arXiv 2510.14717) on the definitions that timm brings: a cosine against a batch
that doubles where the cosine would halve the rate, and a control. ``--parts``: which; the other stays as it was.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean, stdev
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import Record, benchmark, beside_last, shown
from benchmarks.trainers import Module, quiet_trainer
from lightning_ga import AutoAccumulate, optimizer_steps
from lightning_ga.data import Definitions, FashionMNIST
from lightning_ga.models import GPT
from lightning_ga.schedule import from_lr_decay, seesaw
from lightning_ga.weights import TargetTokens

SEEDS = (0, 1, 2)
BATCH, EPOCHS, MILESTONES = 64, 9, [4, 7]
TEXTS, TEXT_EPOCHS = 8, 2
SMALL: dict[str, Any] = {"width": 64, "depth": 2, "heads": 4}


def small_network() -> nn.Sequential:
    """Three convolutions with GroupNorm, as small as one thread trains in a minute."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def fashion(folder: str) -> tuple[TensorDataset, TensorDataset]:
    parts = FashionMNIST(root=folder, val_fraction=0.1).read()
    train, test = ([(part.images.float() / 255 - 0.286) / 0.353, part.labels] for part in (parts.train, parts.test))
    return TensorDataset(*train), TensorDataset(*test)


def smith(folder: str) -> list[dict[str, Any]]:
    train, test = fashion(folder)
    programs: Mapping[str, tuple[list[int], Any]] = {
        "learning rate ÷ 5 at 4 and 7": (MILESTONES, BATCH),
        "batch × 5 at 4 and 7": ([], from_lr_decay(BATCH, milestones=MILESTONES, gamma=0.2)),
        "constant": ([], BATCH),
    }

    def one(name: str) -> dict[str, Any]:
        milestones, asked = programs[name]

        def decayed(parameters: Any) -> Any:
            optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
            return [optimizer], [MultiStepLR(optimizer, milestones, 0.2)]

        module = Module(small_network(), decayed)
        steps = trained(module, asked, BATCH, EPOCHS, train_dataloaders=DataLoader(train, BATCH, shuffle=True))
        with torch.no_grad():
            hits = sum(int((module.net(x).argmax(1) == y).sum()) for x, y in DataLoader(test, 1000))
        return {"score": 100 * hits / len(test), "steps": steps}

    return of_all_seeds(programs, one)


def of_all_seeds(programs: Iterable[str], run: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for seed, name in product(SEEDS, programs):
        pl.seed_everything(seed, verbose=False)
        rows.append({"program": name, "seed": seed, **run(name)})
        print(rows[-1], flush=True)
    return rows


class Definition(GPT):
    """The definitions' GPT with a cosine to zero, or none."""

    cosine = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        if not self.cosine:
            return optimizer
        cosine = CosineAnnealingLR(optimizer, int(optimizer_steps(self.trainer)))
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def trained(module: Any, asked: Any, micro: int, epochs: int, normalize: Any = "samples", **data: Any) -> int:
    callback = AutoAccumulate(asked, micro_batch_size=micro, normalize=normalize)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=epochs, limit_val_batches=0)
    trainer.fit(module, **data)
    return trainer.global_step


def of_definitions(_: str) -> list[dict[str, Any]]:
    data = Definitions(batch_size=TEXTS)
    data.prepare_data()
    data.setup("fit")
    samples = TEXT_EPOCHS * len(data.train_dataloader().dataset)
    programs: Mapping[str, tuple[bool, Any]] = {
        "cosine": (True, TEXTS),
        "seesaw": (False, seesaw(TEXTS, samples=samples)),
        "constant": (False, TEXTS),
    }

    def one(name: str) -> dict[str, Any]:
        module = Definition(**SMALL)
        module.cosine, asked = programs[name]
        steps = trained(module, asked, TEXTS, TEXT_EPOCHS, TargetTokens(), datamodule=data)
        (found,) = quiet_trainer().validate(module, datamodule=data, verbose=False)
        return {"score": found["val/loss"], "steps": steps}

    return of_all_seeds(programs, one)


PARTS: Mapping[str, Callable[[str], list[dict[str, Any]]]] = {"smith": smith, "seesaw": of_definitions}


def means(rows: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Mean score, its standard error and the steps of each program."""
    found = {}
    for name in dict.fromkeys(row["program"] for row in rows):
        scores = [row["score"] for row in rows if row["program"] == name]
        steps = fmean(row["steps"] for row in rows if row["program"] == name)
        found[name] = {"score": fmean(scores), "error": stdev(scores) / len(scores) ** 0.5, "steps": steps}
    return found


def missed(parts: Record) -> Iterator[str]:
    for name, most_steps, apart in (("smith", 0.52, 0.3), ("seesaw", 0.7, 0.005)):
        if name not in parts:
            continue
        recipe, schedule, _ = means(parts[name]).values()
        lost = recipe["score"] - schedule["score"]  # of accuracy
        if round(schedule["steps"] / recipe["steps"], 2) > most_steps:
            yield f"{name}: steps"
        if (lost if name == "smith" else -lost / recipe["score"]) > apart:
            yield f"{name}: score"


def text(record: Record) -> str:
    rows = []
    for part, runs in record["parts"].items():
        found = means(runs)
        recipe = next(iter(found.values()))["steps"]
        for number, (name, row) in enumerate(found.items()):
            scores = f"{row['score']:.3f}", f"{row['error']:.3f}"
            rows.append(("" if number else part, name, *scores, f"{row['steps']:,.0f}", f"{row['steps'] / recipe:.2f}"))
    return shown(
        ("part", "program"),
        ("score", "± error", "steps", "÷ recipe"),
        rows,
        f"smith: test accuracy in percent on Fashion-MNIST, {EPOCHS} epochs of 54,000 pictures, batch {BATCH} at "
        f"first; three convolutions, SGD. seesaw: validation loss on 21,844 definitions, {TEXT_EPOCHS} epochs, batch "
        f"{TEXTS} at first; a GPT of width {SMALL['width']} and depth {SMALL['depth']}, AdamW. Means of {len(SEEDS)} "
        "seeds with their standard error.\n"
        "Targets: smith at most 0.3 points below the recipe in 0.52 of its steps; seesaw at most 0.5 % above in 0.7.",
    )


def measure(parts: Sequence[str] = (*PARTS,), data: str = "data") -> dict[str, Any]:
    found = beside_last("schedules", "parts", {part: PARTS[part](data) for part in parts})
    return {"parts": found, "missed": [*missed(found)]}


main = benchmark("schedules", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
