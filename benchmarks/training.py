"""Does the same training come out? ``python -m benchmarks.training``.

scikit-learn's digits in one pass of 64 and in micro-batches of the same samples. Two more groups of rows show what no
accumulation can help: ReLU networks, whose kinks amplify rounding (a whole batch whose samples are merely summed in
another order parts ways as well; in fp64 nothing does), and BatchNorm.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

from benchmarks.output import MET, Record, benchmark, error, shown
from benchmarks.trainers import Module, flat, quiet_trainer, relative_error
from lightning_ga import AutoAccumulate

EFFECTIVE = 64
TRAINED_ON = 1300  # of 1,797 digits; 21 windows an epoch, the last of 20
WEIGHTS_TARGET = 1e-4
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    network: str = "group norm"
    micro: int = EFFECTIVE
    stock: bool = False
    double: bool = False
    reverse: bool = False
    targeted: bool = False

    def net(self) -> nn.Sequential:
        norm: Any = nn.BatchNorm2d if self.network == "batch norm" else partial(nn.GroupNorm, 4)
        activation = nn.ReLU if self.network == "relu" else nn.GELU
        layers = [nn.Conv2d(1, 16, 3, padding=1), norm(16), activation()]
        layers += [nn.Conv2d(16, 32, 3, stride=2, padding=1), norm(32), activation()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


# The first of each group is the whole batch that the others are compared with.
GROUPS = (
    (
        Program("64 whole", stock=True),
        Program("16×4, stock Lightning", micro=16, stock=True),
        Program("16×4, ours", micro=16, targeted=True),
        Program("13+13+13+13+12, stock Lightning", micro=13, stock=True),
        Program("13+13+13+13+12, ours", micro=13, targeted=True),
    ),
    (
        Program("ReLU: 64 whole", "relu", stock=True),
        Program("ReLU: 64 whole, summed in reverse", "relu", stock=True, reverse=True),
        Program("ReLU: 16×4, ours", "relu", micro=16),
    ),
    (
        Program("ReLU in fp64: 64 whole", "relu", stock=True, double=True),
        Program("ReLU in fp64: 16×4, ours", "relu", micro=16, double=True, targeted=True),
    ),
    (Program("BatchNorm: 64 whole", "batch norm", stock=True), Program("BatchNorm: 4×16, ours", "batch norm", micro=4)),
)


Trained = tuple[Tensor, float, int]  # the weights and accuracy that a training ended with, and its steps


@cache
def digits(dtype: torch.dtype) -> tuple[TensorDataset, Tensor, Tensor]:
    """Training set, held-out images and labels; split once and for all."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = (torch.from_numpy(images).to(dtype) / 16).view(-1, 1, 8, 8)[order]
    targets = torch.from_numpy(labels)[order]
    return TensorDataset(inputs[:TRAINED_ON], targets[:TRAINED_ON]), inputs[TRAINED_ON:], targets[TRAINED_ON:]


def train(program: Program, seed: int, epochs: int) -> Trained:
    """Train from the seed's weights on the seed's order of samples, which stock Lightning and ours share."""
    dtype = torch.float64 if program.double else torch.float32
    dataset, images, labels = digits(dtype)
    pl.seed_everything(seed, verbose=False)
    module = Module(program.net().to(dtype), SGD)
    settings: dict[str, Any] = {"accumulate_grad_batches": -(-EFFECTIVE // program.micro)}
    if not program.stock:
        settings = {"callbacks": [AutoAccumulate(EFFECTIVE, micro_batch_size=program.micro, batch_norm="ignore")]}
    order = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
    collate = (lambda samples: default_collate(samples[::-1])) if program.reverse else None
    trainer = quiet_trainer(max_epochs=epochs, **settings)
    trainer.fit(module, DataLoader(dataset, batch_size=program.micro, sampler=order, collate_fn=collate))
    with torch.no_grad():
        accuracy = (module.eval().net(images).argmax(1) == labels).double().mean()
    return flat(module.parameters()), float(accuracy), trainer.global_step


def row(program: Program, whole: Sequence[Trained], trained: Sequence[Trained]) -> dict[str, Any]:
    """A program beside the whole batch, seed by seed."""
    weights = [relative_error(one[0], other[0]) for one, other in zip(trained, whole)]
    accuracies, oracle = [one[1] for one in trained], [one[1] for one in whole]
    exact = max(weights) <= WEIGHTS_TARGET and accuracies == oracle
    return {
        "program": asdict(program),
        "weights": weights,
        "accuracy": accuracies,
        "steps": trained[0][2],
        "met": exact if program.targeted else None,
    }


def text(record: Record) -> str:
    rows = []
    for one in (one for rows in record["groups"] for one in rows):
        accuracies = "  ".join(f"{100 * accuracy:.2f}" for accuracy in one["accuracy"])
        distance = error(max(one["weights"])) if any(one["weights"]) else "–"
        rows.append((one["program"]["name"], distance, accuracies, MET[one["met"]]))
    steps = record["groups"][0][0]["steps"]
    return shown(
        ("effective batch of 64 as",),
        ("weights", "accuracy of each seed, %", "met"),
        rows,
        f"scikit-learn digits, {record['trained_on']:,} to train on, {record['epochs']} epochs, {steps} optimizer steps"
        " of SGD\nwith momentum. weights: relative distance of the final weights to those of the\n"
        "whole batch that heads the group, the largest over the seeds.",
    )


def measure(epochs: int = 5, seeds: int = 3) -> dict[str, Any]:
    groups = []
    for programs in GROUPS:
        trained = [[train(program, seed, epochs) for seed in range(seeds)] for program in programs]
        groups.append([row(program, trained[0], one) for program, one in zip(programs, trained)])
    missed = [one["program"]["name"] for rows in groups for one in rows if one["met"] is False]
    return {"epochs": epochs, "trained_on": TRAINED_ON, "groups": groups, "missed": missed}


main = benchmark("training", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
