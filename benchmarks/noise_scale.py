"""Is ``NoiseScale`` right? ``python -m benchmarks.noise_scale``.

A small CNN trains on Fashion-MNIST. At three moments the exact gradient noise scale (McCandlish et al., arXiv
1812.06162) is computed from the gradients of all samples by themselves, and ``NoiseScale`` estimates it: at these very
weights, with a learning rate of zero, and over the last windows while it trains. ``--data``: Fashion-MNIST's folder.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import Record, benchmark, shown
from benchmarks.schedules import fashion, small_network
from benchmarks.trainers import Module, quiet_trainer
from lightning_ga import AutoAccumulate
from lightning_ga.callbacks import NORMS, NoiseScale

SAMPLES, WINDOW, MICRO_BATCH = 6000, 128, 16
WINDOWS = 200  # of an estimate at fixed weights
TRAINING_WINDOWS = 64  # the default of the callback
MOMENTS = (100, 400, 1200)  # optimizer steps
CLOSE = 0.25


def exact(net: nn.Module, data: TensorDataset, names: Sequence[str]) -> float:
    """tr Σ / |G|² over all samples, of some parameters."""
    parameters = {name: value.detach() for name, value in net.named_parameters()}

    def loss(chosen: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(net, {**parameters, **chosen}, (image[None],))
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


def estimated(net: nn.Module, rate: float, data: TensorDataset, steps: int, windows: int) -> list[float | None]:
    """Train so many steps at a learning rate with the callback; its estimate and the standard error."""
    noise = NoiseScale(windows)
    callback = AutoAccumulate(WINDOW, micro_batch_size=MICRO_BATCH)
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.9 if rate else 0.0)
    trainer = quiet_trainer(callbacks=[callback, noise], max_steps=steps, max_epochs=-1, limit_val_batches=0)
    trainer.fit(Module(net, optimizer), DataLoader(data, MICRO_BATCH, shuffle=True, drop_last=True))
    return [None, None] if noise.estimate is None else [noise.estimate.value, noise.estimate.error]


def measure(data: str = "data") -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    pictures = TensorDataset(*(tensor[:SAMPLES] for tensor in fashion(data)[0].tensors))
    net, rows, done = small_network(), [], 0
    everything = [name for name, _ in net.named_parameters()]
    norms = [name for name in everything if isinstance(net.get_submodule(name.rpartition(".")[0]), NORMS)]
    for moment in MOMENTS:
        trains, trains_error = estimated(net, 0.02, pictures, moment - done, TRAINING_WINDOWS)
        frozen = small_network()
        frozen.load_state_dict(net.state_dict())
        value, deviation = estimated(frozen, 0.0, pictures, WINDOWS, WINDOWS)
        row = {"steps": moment, "exact": exact(net, pictures, norms), "exact_all": exact(net, pictures, everything)}
        row |= {"estimate": value, "error": deviation, "while_training": trains, "while_training_error": trains_error}
        rows.append(row)
        print(rows[-1], flush=True)
        done = moment
    wrong = (row for row in rows if row["estimate"] is None or abs(row["estimate"] / row["exact"] - 1) > CLOSE)
    return {"rows": rows, "missed": [f"step {row['steps']}" for row in wrong]}


def text(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        value, trains = row["estimate"], row["while_training"]
        found = ("unknown", "", "")
        if value is not None:
            found = f"{value:.1f}", f"{row['error']:.1f}", f"{value / row['exact']:.2f}"
        beside = "unknown" if trains is None else f"{trains:.1f}"
        rows.append((str(row["steps"]), f"{row['exact']:.1f}", *found, beside, f"{row['exact_all']:.1f}"))
    return shown(
        ("step",),
        ("exact", "estimate", "± error", "÷ exact", "while training", "all parameters"),
        rows,
        f"Samples. A CNN with GroupNorm on {SAMPLES:,} pictures of Fashion-MNIST, windows of {WINDOW} in micro-batches "
        f"of {MICRO_BATCH}. exact: tr Σ / |G|² of the normalisation layers, from each sample's gradient by itself. "
        f"estimate: NoiseScale over {WINDOWS} windows at these weights. while training: over the last windows of "
        f"training. all parameters: exact, of the whole model.\nTarget: within {CLOSE:.0%} of exact.",
    )


main = benchmark("noise_scale", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
