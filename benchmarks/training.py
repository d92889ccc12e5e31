"""Does the same training come out? ``python -m benchmarks.training``.

scikit-learn's digits, a small GroupNorm network, SGD, three seeds: the effective batch of 64 in one
pass, as 16×4, and as 13+13+13+13+12. All see the same samples in the same order. Two more groups of
rows show what no accumulation can help: ReLU networks, whose kinks amplify rounding (a whole batch
whose samples are merely summed in another order parts ways as well; in fp64 nothing does), and
BatchNorm. Exits with 1 if weights or accuracy of ours differ from the whole batch's.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

from benchmarks.output import MET, as_text, conclude, empty_table, error, options
from benchmarks.trainers import quiet, quiet_trainer
from lightning_ga import AutoAccumulate

EFFECTIVE = 64
TRAINED_ON = 1300  # of 1,797 digits; 21 windows an epoch, the last of 20
WEIGHTS_TARGET = 1e-4
Network = Literal["group norm", "relu", "batch norm"]


@dataclass(frozen=True, slots=True)
class Program:
    """One way to train."""

    name: str
    network: Network = "group norm"
    micro: int = EFFECTIVE
    stock: bool = False
    double: bool = False
    reverse: bool = False
    targeted: bool = False

    @property
    def factor(self) -> int:
        return -(-EFFECTIVE // self.micro)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32


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


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training ended with."""

    weights: Tensor
    accuracy: float
    steps: int


def convolutions(norm: Callable[[int], nn.Module], activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Two convolutions, each with its normalization, and ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        norm(16),
        activation(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        norm(32),
        activation(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


class Digits(pl.LightningModule):
    """A network on the digits; no dropout."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@cache
def digits(dtype: torch.dtype) -> tuple[TensorDataset, Tensor, Tensor]:
    """Training set, held-out images and labels; split once and for all."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = (torch.from_numpy(images).to(dtype) / 16).view(-1, 1, 8, 8)[order]
    targets = torch.from_numpy(labels)[order]
    return TensorDataset(inputs[:TRAINED_ON], targets[:TRAINED_ON]), inputs[TRAINED_ON:], targets[TRAINED_ON:]


def train(program: Program, seed: int, epochs: int) -> Trained:
    """Train from the seed's weights on the seed's order of samples."""
    dataset, images, labels = digits(program.dtype)
    pl.seed_everything(seed, verbose=False)
    norm = nn.BatchNorm2d if program.network == "batch norm" else partial(nn.GroupNorm, 4)
    module = Digits(convolutions(norm, nn.ReLU if program.network == "relu" else nn.GELU).to(program.dtype))
    settings: dict[str, Any] = {"accumulate_grad_batches": program.factor}
    if not program.stock:
        settings = {"callbacks": [AutoAccumulate(EFFECTIVE, micro_batch_size=program.micro, batch_norm="ignore")]}
    trainer = quiet_trainer(max_epochs=epochs, **settings)
    trainer.fit(module, in_order(dataset, program.micro, seed, _in_reverse if program.reverse else default_collate))
    weights = torch.cat([parameter.detach().flatten().double() for parameter in module.parameters()])
    with torch.no_grad():
        accuracy = (module.eval().net(images).argmax(1) == labels).double().mean()
    return Trained(weights, float(accuracy), trainer.global_step)


def in_order(dataset: TensorDataset, micro: int, seed: int, collate: Any = default_collate) -> DataLoader[Any]:
    """Load in the seed's order, by a sampler that stock Lightning and ours share."""
    order = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
    return DataLoader(dataset, batch_size=micro, sampler=order, collate_fn=collate)


def _in_reverse(samples: list[Any]) -> Any:
    return default_collate(samples[::-1])


def row(program: Program, whole: Sequence[Trained], trained: Sequence[Trained]) -> dict[str, Any]:
    """A program beside the whole batch, seed by seed."""
    weights = [float((a.weights - b.weights).norm() / b.weights.norm()) for a, b in zip(trained, whole)]
    largest = [float((a.weights - b.weights).abs().max()) for a, b in zip(trained, whole)]
    accuracies, oracle = [one.accuracy for one in trained], [one.accuracy for one in whole]
    exact = max(weights) <= WEIGHTS_TARGET and accuracies == oracle
    return {
        "program": {**asdict(program), "factor": program.factor},
        "weights": weights,
        "largest_difference": largest,
        "accuracy": accuracies,
        "steps": trained[0].steps,
        "met": exact if program.targeted else None,
    }


def table(groups: Sequence[Sequence[dict[str, Any]]]) -> Table:
    shown = empty_table(("effective batch of 64 as",), ("weights", "accuracy of each seed, %", "met"))
    for rows in groups:
        for one in rows:
            accuracies = "  ".join(f"{100 * accuracy:.2f}" for accuracy in one["accuracy"])
            distance = error(max(one["weights"])) if any(one["weights"]) else "–"
            shown.add_row(one["program"]["name"], distance, accuracies, MET[one["met"]])
        shown.add_section()
    return shown


def text(record: Mapping[str, Any]) -> str:
    steps = record["groups"][0][0]["steps"]
    legend = (
        f"scikit-learn digits, {record['trained_on']:,} to train on, {record['epochs']} epochs, {steps} optimizer steps"
        " of SGD\nwith momentum. weights: relative distance of the final weights to those of the\n"
        "whole batch that heads the group, the largest over the seeds."
    )
    return as_text(table(record["groups"]), legend)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("training", __doc__)
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each training")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each program")
    settings = parser.parse_args(arguments)
    quiet()
    start, seeds, groups = time.perf_counter(), range(settings.seeds), []
    for programs in GROUPS:
        trained = [[train(program, seed, settings.epochs) for seed in seeds] for program in programs]
        groups.append([row(program, trained[0], one) for program, one in zip(programs, trained)])
    record = {
        "epochs": settings.epochs,
        "seeds": list(seeds),
        "trained_on": TRAINED_ON,
        "weights_target": WEIGHTS_TARGET,
        "seconds": round(time.perf_counter() - start, 1),
        "groups": groups,
    }
    unequal = (one["program"]["name"] for rows in groups for one in rows if one["met"] is False)
    return conclude("training", record, text, unequal)


if __name__ == "__main__":
    sys.exit(main())
