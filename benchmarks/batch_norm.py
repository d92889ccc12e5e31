"""Does a rescaled momentum of BatchNorm help? ``python -m benchmarks.batch_norm``.

scikit-learn's digits, two convolutions with BatchNorm, SGD: the effective batch of 64 in one pass, as 16×4
and as 32×2, with BatchNorm's momentum m as it is and rescaled to 1 − (1 − m)^(1/factor), so that running
statistics move in a window as far as in one pass, with a constant learning rate and with one that falls to zero.
Gradients do not read running statistics, so both end with the same weights, bit for bit: what differs is
evaluation alone, seed by seed. Beside it stands
``torch.optim.swa_utils.update_bn``, one pass over the training set once training is over. Exits with 1 if
weights differ.
"""

import copy
import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from benchmarks.output import as_text, conclude, empty_table, options
from benchmarks.trainers import quiet, quiet_trainer
from benchmarks.training import EFFECTIVE, TRAINED_ON, Digits, convolutions, digits, in_order
from lightning_ga import AutoAccumulate

MICRO_BATCHES = (4, 2)
Schedule = Literal["constant", "cosine"]
RATES = {"constant": "constant learning rate", "cosine": "learning rate that falls to 0"}


class Scheduled(Digits):
    """Two convolutions with BatchNorm, and a learning rate that stays or falls."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(convolutions(nn.BatchNorm2d, nn.ReLU))
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.schedule == "constant":
            return optimizer
        steps = self.trainer.max_epochs * math.ceil(TRAINED_ON / EFFECTIVE)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def train(schedule: Schedule, micro: int, seed: int, epochs: int, *, rescaled: bool = False) -> Scheduled:
    """Train from the seed's weights on the seed's order of samples, if ``rescaled`` with a momentum for the factor."""
    pl.seed_everything(seed, verbose=False)
    module = Scheduled(schedule)
    if rescaled:
        rescale_momentum(module.net, EFFECTIVE // micro)
    callback = AutoAccumulate(EFFECTIVE, micro_batch_size=micro, batch_norm="ignore")
    quiet_trainer(max_epochs=epochs, callbacks=[callback]).fit(module, in_order(digits(torch.float32)[0], micro, seed))
    return module


def rescale_momentum(net: nn.Module, factor: int) -> None:
    """Let ``factor`` micro-batches move running statistics as far as one pass with the momentum did."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.momentum is not None
            layer.momentum = 1 - (1 - layer.momentum) ** (1 / factor)


def updated(module: Scheduled) -> nn.Module:
    """The network with the statistics of the whole training set, under its last weights."""
    net = copy.deepcopy(module.net)
    update_bn(DataLoader(digits(torch.float32)[0], batch_size=TRAINED_ON), net)
    return net


@torch.no_grad()
def evaluated(net: nn.Module, oracle: nn.Module) -> dict[str, float]:
    """A network on the held-out digits, and its statistics beside those of the oracle."""
    _, images, labels = digits(torch.float32)
    logits, ours, whole = net.eval()(images), _statistics(net), _statistics(oracle)
    loss = float(nn.functional.cross_entropy(logits, labels))
    accuracy = float((logits.argmax(1) == labels).double().mean())
    return {"loss": loss, "accuracy": accuracy, "statistics": float((ours - whole).norm() / whole.norm())}


def _statistics(net: nn.Module) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in net.buffers() if buffer.is_floating_point()])


def rows_of(schedule: Schedule, seed: int, epochs: int) -> tuple[dict[str, dict[str, float]], bool]:
    """All programs from one seed, and whether those with equal passes ended with equal weights."""
    whole, same = train(schedule, EFFECTIVE, seed, epochs), True
    oracle = updated(whole)
    rows = {"64 whole": evaluated(whole.net, oracle), "64 whole, update_bn": evaluated(oracle, oracle)}
    for micro in MICRO_BATCHES:
        name = f"{EFFECTIVE // micro}×{micro}"
        plain = train(schedule, micro, seed, epochs)
        rescaled = train(schedule, micro, seed, epochs, rescaled=True)
        oracle = updated(plain)
        rows[name] = evaluated(plain.net, oracle)
        rows[f"{name}, rescaled"] = evaluated(rescaled.net, oracle)
        rows[f"{name}, update_bn"] = evaluated(oracle, oracle)
        same &= all(torch.equal(a, b) for a, b in zip(plain.parameters(), rescaled.parameters()))
    return rows, same


def table(groups: Mapping[str, Mapping[str, Any]]) -> Table:
    shown = empty_table(("effective batch of 64 as",), ("loss", "accuracy", "statistics", "gain"))
    for schedule, programs in groups.items():
        shown.add_row(f"{RATES[schedule]}")
        for name, seeds in programs.items():
            loss, accuracy, away = (fmean(one[key] for one in seeds) for key in ("loss", "accuracy", "statistics"))
            without = name.partition(",")[0]
            gain = "–" if name == without else _gain(programs[without], seeds)
            shown.add_row(f"  {name}", f"{loss:.4f}", f"{100 * accuracy:.2f} %", f"{100 * away:.1f} %", gain)
        shown.add_section()
    return shown


def _gain(plain: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> str:
    gains = [a["loss"] - b["loss"] for a, b in zip(plain, other)]
    spread = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else math.nan
    return f"{fmean(gains):+.4f} ± {spread:.4f}"


def text(record: Mapping[str, Any]) -> str:
    legend = (
        f"scikit-learn digits, {TRAINED_ON:,} to train on, {record['epochs']} epochs, means of {len(record['seeds'])} "
        "seeds.\n"
        "statistics: relative distance of the running statistics to those of the\n"
        "training set under the last weights. gain: the loss without less this one, by\n"
        "seed, ± the standard error; above 0 is better than doing nothing."
    )
    return as_text(table(record["groups"]), legend)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("batch_norm", __doc__)
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each training")
    parser.add_argument("--seeds", type=int, default=8, help="seeds of each program")
    settings = parser.parse_args(arguments)
    quiet()
    start, seeds = time.process_time(), range(settings.seeds)
    groups: dict[str, dict[str, list[dict[str, float]]]] = {}
    same_weights = True
    for schedule in RATES:
        by_seed = [rows_of(schedule, seed, settings.epochs) for seed in seeds]
        same_weights &= all(same for _, same in by_seed)
        groups[schedule] = {name: [rows[name] for rows, _ in by_seed] for name in by_seed[0][0]}
    record = {
        "epochs": settings.epochs,
        "seeds": list(seeds),
        "same_weights": same_weights,
        "cpu_seconds": round(time.process_time() - start, 1),
        "groups": groups,
    }
    return conclude("batch_norm", record, text, [] if same_weights else ["weights differ"])


if __name__ == "__main__":
    sys.exit(main())
