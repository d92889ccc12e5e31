"""Draw the pictures of the documentation: ``python -m benchmarks.pictures``.

``curve`` and ``survival`` show measurements, which lie in ``benchmarks/results/pictures.json``; ``window`` and ``plan``
show what ``plan_accumulation`` returns. ``--drawn-only`` draws the last measurements.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import parsed, read_json, write_json
from benchmarks.trainers import Module, mean_square, quiet, quiet_trainer
from lightning_ga import AutoAccumulate, find_micro_batch, plan_accumulation
from lightning_ga.testing import limit_memory

FOLDER = Path(__file__).parents[1] / "docs" / "images"
INKS = {"light": "#212121", "dark": "#e0e0e0"}
RANKS = ("#3f7fbf", "#d98c3a")
FITS, REFUSED, BUDGET = "#3a9a5b", "#cc4b4b", "#cc4b4b"
MIB = 2**20
LIMIT, EFFECTIVE = 119, 256  # of the picture of a plan


def measured_curve() -> dict[str, Any]:
    """Probe resnet34d at 32×32 with Adam, gradients alive in the forward pass."""
    torch.manual_seed(0)
    net = timm.create_model("resnet34d", num_classes=10)
    optimizer = torch.optim.Adam(net.parameters())
    images, labels = torch.randn(512, 3, 32, 32), torch.randint(10, (512,))

    def step(samples: int) -> None:
        nn.functional.cross_entropy(net(images[:samples]), labels[:samples]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    found = find_micro_batch(step, high=512, budget="500MiB", device="cpu")
    trials = [(trial.micro_batch_size, trial.peak_bytes, trial.fits) for trial in found.trials]
    return {"limit": found.limit, "budget": found.budget_bytes, "curve": found.curve, "trials": trials}


class Observer(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the live bytes after each operation of each pass, until memory runs out in it."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory
        self.attempts: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attempt = self.attempts[-1] if self.attempts else {"failed": True, "live": []}  # before the first pass: dropped
        try:
            return func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            attempt["failed"] = True
            raise
        finally:
            if not attempt["failed"]:
                attempt["live"].append(self.memory.live_bytes)


def measured_survival() -> dict[str, Any]:
    """Train one batch of 4,096 samples within a budget that they do not fit in."""
    quiet()
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    data = TensorDataset(torch.randn(4096, 256))
    with limit_memory("30MiB") as memory, Observer(memory) as observer:

        def noted(net: nn.Module, samples: Tensor) -> Tensor:
            observer.attempts.append({"samples": len(samples), "failed": False, "live": []})
            return mean_square(net, samples)

        module = Module(nn.Sequential(*layers, nn.Linear(256, 1)), partial(torch.optim.SGD, lr=0.01), noted)
        accumulate = AutoAccumulate(micro_batch_size=4096, verify=False)
        quiet_trainer(max_epochs=1, callbacks=[accumulate]).fit(module, DataLoader(data, batch_size=4096))
    return {"budget": memory.budget, "attempts": observer.attempts, "oom_events": accumulate.oom_events}


def window(axes: Axes, _record: Mapping[str, Any], ink: str) -> None:
    """Show an epoch of 22 samples, windows of 8, two ranks, micro-batches of at most 2."""
    left = 0.0
    for number, size in enumerate((8, 8, 6)):
        planned = plan_accumulation(size, micro_batch=2, world_size=2)
        width = max(sum(rank) for rank in planned.chunks) + 0.3 * (planned.factor - 1)
        for rank, chunks in enumerate(planned.chunks):
            at = left
            for chunk in chunks:
                for sample in range(chunk):
                    axes.add_patch(Rectangle((at + sample, 1.4 - 1.3 * rank), 0.9, 0.9, color=RANKS[rank]))
                if rank == 0:
                    weight = planned.factor * planned.world_size * chunk / size
                    axes.text(at + chunk / 2, -0.45, f"×{weight:.2f}" if weight != 1 else "×1", ha="center", color=ink)
                at += chunk + 0.3
        axes.plot([left, left, left + width, left + width], [2.55, 2.7, 2.7, 2.55], color=ink, linewidth=1)
        name = f"window {number + 1}" + (", ragged" if size < 8 else "")
        axes.text(left + width / 2, 2.85, f"{name}:\n{size} samples", ha="center", color=ink)
        left += width + 1.6
    for rank, color in enumerate(RANKS):
        axes.text(-0.4, 1.85 - 1.3 * rank, f"rank {rank}", ha="right", va="center", color=color)
    axes.text(-0.4, -0.45, "weight", ha="right", color=ink)
    axes.set(xlim=(-2.4, left - 1.3), ylim=(-0.7, 4.2))
    axes.axis("off")


def plan(axes: Axes, _record: Mapping[str, Any], ink: str) -> None:
    """Show an effective batch in full chunks and a remainder, and in near-equal chunks."""
    full = [LIMIT] * (EFFECTIVE // LIMIT) + [EFFECTIVE % LIMIT]
    even = plan_accumulation(EFFECTIVE, micro_batch=LIMIT).chunks[0]
    groups = ((full, RANKS[1], "as many as fit, then the rest"), (even, RANKS[0], "near-equal, as planned here"))
    for start, (chunks, color, name) in zip((0, 4), groups):
        bars = axes.bar(range(start, start + len(chunks)), chunks, color=color, width=0.8)
        axes.bar_label(bars, color=ink, padding=2)
        axes.text(start + 1, -14, name, ha="center", va="top", color=ink)
    axes.axhline(LIMIT, color=BUDGET, linestyle="--", linewidth=1)
    axes.text(6.5, LIMIT + 3, f"limit: {LIMIT}", ha="right", color=BUDGET)
    axes.set(ylabel="samples of a micro-batch", ylim=(0, 150), xticks=[])
    axes.set_title(f"an effective batch of {EFFECTIVE}")


def curve(axes: Axes, record: Mapping[str, Any], ink: str) -> None:
    """Show the predicted peak by micro-batch, and the steps that ran."""
    found = record["curve"]
    budget, limit = found["budget"] / MIB, found["limit"]
    points = [(samples, peak / MIB) for samples, peak in found["curve"] if peak / MIB < 1.15 * budget]
    axes.plot(*zip(*points), color=RANKS[0], linewidth=2, label="predicted peak")
    steps = [(samples, peak / MIB) for samples, peak, fits in found["trials"] if fits]
    axes.plot(*zip(*steps), "o", color=FITS, label="steps that ran", zorder=3)
    axes.axhline(budget, color=BUDGET, linestyle="--", linewidth=1, label=f"budget: {budget:.0f} MiB")
    axes.annotate(
        f"limit: {limit}", (limit, budget), (limit * 0.78, budget * 1.06), color=ink, va="bottom", ha="center",
        arrowprops={"arrowstyle": "-", "color": ink},
    )  # fmt: skip
    axes.set(xlabel="samples of a micro-batch", ylabel="peak memory, MiB", ylim=(0, 1.25 * budget), xlim=(0, None))
    axes.legend(frameon=False, labelcolor=ink, loc="lower right")


def survival(axes: Axes, record: Mapping[str, Any], ink: str) -> None:
    """Show live memory by operation: an attempt that fails, and its halves."""
    seen = record["survival"]
    budget, at = seen["budget"] / MIB, 0
    for part in seen["attempts"]:
        live = [value / MIB for value in part["live"]] + [budget] * part["failed"]
        places = range(at, at + len(live))
        axes.plot(places, live, color=REFUSED if part["failed"] else RANKS[0], linewidth=2)
        if part["failed"]:
            axes.plot(places[-1:], [budget], "x", color=REFUSED, markersize=10, markeredgewidth=2.5)
            axes.text(at, 1, f"{part['samples']:,} samples:\nout of memory", color=ink)
            at += 40
        else:
            axes.text(at + len(live) / 2, 1, f"{part['samples']:,} samples", ha="center", color=ink)
        at += len(live) + 8
    axes.axhline(budget, color=BUDGET, linestyle="--", linewidth=1)
    axes.text(at, budget * 1.02, f"budget: {budget:.0f} MiB", ha="right", color=BUDGET)
    axes.set(xlabel="operations of PyTorch", ylabel="live memory, MiB", ylim=(0, 1.15 * budget), xticks=[])


PICTURES: Mapping[str, tuple[Callable[[Axes, Mapping[str, Any], str], None], float]] = {
    "window": (window, 1.9),
    "plan": (plan, 2.8),
    "curve": (curve, 3.0),
    "survival": (survival, 2.8),
}


@contextmanager
def inked(ink: str) -> Iterator[None]:
    """Draw lines and text in one colour without a background, and write the same files on every run."""
    keys = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    plain = {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "lightning_ga", "font.size": 9.5}
    with rc_context({**dict.fromkeys(keys, ink), **plain, "savefig.transparent": True, "axes.titlesize": 10}):
        yield


def draw(record: Mapping[str, Any], folder: Path = FOLDER) -> None:
    for name, (paint, height) in PICTURES.items():
        for page, ink in INKS.items():
            with inked(ink):
                figure = Figure(figsize=(5.6, height), layout="constrained")
                paint(figure.subplots(), record, ink)
                figure.savefig(folder / f"{name}-{page}.svg", metadata={"Date": None})


def made(drawn_only: bool = False) -> None:
    if not drawn_only:
        quiet()
        write_json("pictures", {"curve": measured_curve(), "survival": measured_survival()})
    draw(read_json("pictures"))


if __name__ == "__main__":
    made(**parsed("pictures", __doc__, made, None))
