"""Is ``NoiseScale`` right? ``python -m benchmarks.noise_scale``.

A small CNN with GroupNorm trains on 6,000 pictures of Fashion-MNIST. At three moments the exact gradient noise scale
(McCandlish et al., arXiv 1812.06162) is computed from the gradients of all samples by themselves, and ``NoiseScale``
estimates it: at these very weights, with a learning rate of zero, and over the last windows while it trains.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import as_text, conclude, empty_table, options
from benchmarks.schedules import Network, fashion
from benchmarks.trainers import quiet, quiet_trainer
from lightning_ga import AutoAccumulate
from lightning_ga.callbacks import NORMS, NoiseScale

SAMPLES, WINDOW, MICRO_BATCH = 6000, 128, 16
WINDOWS = 200  # of an estimate at fixed weights
TRAINING_WINDOWS = 64  # the default of the callback
MOMENTS = (100, 400, 1200)  # optimizer steps
CLOSE = 0.25


class Constant(Network):
    """The network at a learning rate that stays."""

    def __init__(self, rate: float) -> None:
        super().__init__([])
        self.rate = rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9 if self.rate else 0.0)


def exact(module: Network, data: TensorDataset, names: Sequence[str]) -> float:
    """tr Σ / |G|² over all samples, of some parameters."""
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def loss(chosen: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(module, {**parameters, **chosen}, (image[None],))
        return nn.functional.cross_entropy(logits, label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    chosen = {name: parameters[name] for name in names}
    total, squares = {name: torch.zeros_like(value) for name, value in chosen.items()}, 0.0
    for images, labels in DataLoader(data, 200):
        for name, found in each(chosen, images, labels).items():
            total[name] += found.sum(0)
            squares += float(found.square().sum())
    mean = sum(float((value / len(data)).square().sum()) for value in total.values())
    return (squares / len(data) - mean) / mean


def estimated(module: Network, data: TensorDataset, steps: int, windows: int) -> list[float | None]:
    """Train so many steps with the callback; its estimate and the standard error."""
    noise = NoiseScale(windows)
    callback = AutoAccumulate(WINDOW, micro_batch_size=MICRO_BATCH)
    trainer = quiet_trainer(callbacks=[callback, noise], max_steps=steps, max_epochs=-1, limit_val_batches=0)
    trainer.fit(module, DataLoader(data, MICRO_BATCH, shuffle=True, drop_last=True))
    return [None, None] if noise.estimate is None else [noise.estimate.value, noise.estimate.error]


def measured(folder: str) -> list[dict[str, Any]]:
    """A row for each moment."""
    pl.seed_everything(0, verbose=False)
    train = fashion(folder)[0]
    data = TensorDataset(*(tensor[:SAMPLES] for tensor in train.tensors))
    module, rows, done = Constant(0.02), [], 0
    norms = [
        f"{place}.{name}"
        for place, layer in module.named_modules()
        if isinstance(layer, NORMS)
        for name, _ in layer.named_parameters(recurse=False)
    ]
    for moment in MOMENTS:
        trains, trains_error = estimated(module, data, moment - done, TRAINING_WINDOWS)
        frozen = Constant(0.0)
        frozen.load_state_dict(module.state_dict())
        value, deviation = estimated(frozen, data, WINDOWS, WINDOWS)
        everything = [name for name, _ in module.named_parameters()]
        row = {"steps": moment, "exact": exact(module, data, norms), "exact_all": exact(module, data, everything)}
        row |= {"estimate": value, "error": deviation, "while_training": trains, "while_training_error": trains_error}
        rows.append(row)
        print(rows[-1], flush=True)
        done = moment
    return rows


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The moments at which the estimate is too far from the exact value."""
    return [
        f"step {row['steps']}"
        for row in rows
        if row["estimate"] is None or abs(row["estimate"] / row["exact"] - 1) > CLOSE
    ]


def text(record: Mapping[str, Any]) -> str:
    """Table and legend of a record."""
    table = empty_table(["step"], ["exact", "estimate", "± error", "÷ exact", "while training", "all parameters"])
    for row in record["rows"]:
        value, trains = row["estimate"], row["while_training"]
        found = ("unknown", "", "")
        if value is not None:
            found = f"{value:.1f}", f"{row['error']:.1f}", f"{value / row['exact']:.2f}"
        beside = "unknown" if trains is None else f"{trains:.1f}"
        table.add_row(str(row["steps"]), f"{row['exact']:.1f}", *found, beside, f"{row['exact_all']:.1f}")
    legend = (
        f"Samples. A CNN with GroupNorm on {SAMPLES:,} pictures of Fashion-MNIST, windows of {WINDOW} in micro-batches "
        f"of {MICRO_BATCH}. exact: tr Σ / |G|² of the normalisation layers, from each sample's gradient by itself. "
        f"estimate: NoiseScale over {WINDOWS} windows at these weights. while training: over the last windows of "
        f"training. all parameters: exact, of the whole model.\nTarget: within {CLOSE:.0%} of exact."
    )
    return as_text(table, legend)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, write; 1 if a target is missed."""
    parser = options("noise_scale", __doc__)
    parser.add_argument("--data", default="data", help="folder with Fashion-MNIST")
    folder = parser.parse_args(arguments).data
    quiet()
    rows = measured(folder)
    record = {"missed": missed(rows), "rows": rows}
    return conclude("noise_scale", record, text, record["missed"])


if __name__ == "__main__":
    sys.exit(main())
