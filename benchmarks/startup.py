"""How long does a fit take to begin? ``python -m benchmarks.startup``.

Processor time from ``fit`` to the first batch, in training steps of the same model: of stock Lightning, and what
``AutoAccumulate`` adds to it where the batch fits, and where a budget cuts it. Each fit is a fork of one process that
has imported PyTorch, Lightning and timm; the programs take turns. ``--before FOLDER`` measures another checkout of the
package in the same turns.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.networks import CausalBlocks
from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import forked
from benchmarks.trainers import Module, quiet_trainer

BATCH, CLASSES, WORDS, LENGTH = 32, 10, 500, 64
STEPS = 4  # whose shortest is the unit
STOCK, FITS, CUT, FITS_BEFORE, CUT_BEFORE = "stock", "fits", "cut", "fits before", "cut before"
MOST: Mapping[str, float] = {FITS: 1.3, CUT: 6.0}  # steps beyond stock Lightning


class LastState(nn.Module):
    """An LSTM that returns its state after the last word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        states: Tensor = self.recurrent(words)[0]
        return states[:, -1]


def language_model() -> nn.Module:
    embedding = nn.Embedding(WORDS, 192)
    return nn.Sequential(embedding, CausalBlocks(192, 6, 4), nn.LayerNorm(192), nn.Linear(192, WORDS))


def of_words() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 256), LastState(256), nn.Linear(256, CLASSES))


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2 * BATCH, 3, size, size), torch.randint(CLASSES, (2 * BATCH,))


def words(*targets: int, below: int) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (2 * BATCH, LENGTH)), torch.randint(below, (2 * BATCH, *targets))


def classifier(name: str, **settings: Any) -> nn.Module:
    made: nn.Module = timm.create_model(name, num_classes=CLASSES, **settings)
    return made


TASKS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "ResNet-34-D": (partial(classifier, "resnet34d"), partial(images, 32)),
    "DenseNet-121": (partial(classifier, "densenet121"), partial(images, 32)),
    "ViT-Ti": (partial(classifier, "vit_tiny_patch16_224", img_size=96), partial(images, 96)),
    "GPT": (language_model, partial(words, LENGTH, below=WORDS)),
    "LSTM": (of_words, partial(words, below=CLASSES)),
}


class Clock(pl.Callback):
    """Notes the processor time as each batch of training begins."""

    def __init__(self) -> None:
        self.times = [time.process_time()]

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.process_time())


def train(task: str, arguments: Mapping[str, Any] | None, package: Path | None, result: Path) -> None:
    """Fit by stock Lightning, or with ``arguments`` of ``AutoAccumulate``, and write down what is known of it."""
    os.environ["XDG_CACHE_HOME"] = str(result.parent)
    if package is not None:
        sys.path.insert(0, str(package))
    torch.manual_seed(0)
    make, data = TASKS[task]
    callbacks: list[Any] = []
    if arguments is not None:
        from lightning_ga import AutoAccumulate

        callbacks = [AutoAccumulate(cache=False, **arguments)]
    module = Module(make(), partial(torch.optim.AdamW, lr=1e-3))
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    trainer = quiet_trainer(max_epochs=STEPS, callbacks=callbacks)
    clock = Clock()
    trainer.callbacks.append(clock)
    trainer.fit(module, loader)
    start, *batches = (later - earlier for earlier, later in pairwise(clock.times))
    record = {"start": start, "step": min(batches)}
    probe = callbacks[0].probe if callbacks else None
    if probe is not None:
        record["half"] = next((size for samples, size in probe.curve if samples >= BATCH // 2), probe.peak_bytes)
        record["limit"] = probe.limit
    result.write_text(json.dumps(record))


def run(task: str, arguments: Mapping[str, Any] | None, package: Path | None, folder: Path) -> dict[str, float]:
    """Fit in a fork, and return what it wrote down."""
    output, result = folder / "output.txt", folder / "result.json"
    code, _ = forked(partial(train, task, arguments, package, result), output)
    if code:
        raise RuntimeError(f"A fit ended with {code}: {output.read_text()[-3000:]}")
    found: dict[str, float] = json.loads(result.read_text())
    return found


def summarize(task: str, rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Return the median steps that each program adds to the start of stock Lightning's fit.

    Examples:
        >>> rounds = [{STOCK: {"start": 1.0, "step": 0.5}, FITS: {"start": 1.5 + more}} for more in (0, 0.25, 0.1)]
        >>> summarize("a model", rounds)["added"]
        {'fits': 1.2}
    """
    step = statistics.median(one[STOCK]["step"] for one in rounds)
    added = {}
    for program in rounds[0]:
        if program != STOCK:
            seconds = statistics.median(one[program]["start"] - one[STOCK]["start"] for one in rounds)
            added[program] = round(seconds / step, 2)
    return {"task": task, "step_seconds": round(step, 3), "added": added}


def text(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        cells = []
        for program in (FITS, FITS_BEFORE, CUT, CUT_BEFORE):
            steps = row["added"].get(program)
            missed = " NO" * (steps is not None and steps > MOST.get(program, steps))
            cells.append("–" if steps is None else f"{steps:.1f}{missed}")
        rows.append((row["task"], f"{row['step_seconds']:.2f}", *cells))
    limits = (f"at most {MOST[FITS]:.1f}", "", f"at most {MOST[CUT]:.1f}", "")
    return shown(
        ("", "step, s"),
        ("fits", "before", "cut", "before"),
        [*rows, ("", "", *limits)],
        f"Processor time from fit to the first batch beyond stock Lightning's, in training steps of {BATCH} samples: "
        f"where the batch fits, and where a budget cuts it in halves. Before: {record['before'] or 'not measured'}. "
        f"Medians of {record['rounds']} rounds; one thread; load average {record['load_average']:.1f}.",
    )


def commit_of(folder: str) -> str:
    call = ["git", "-C", folder, "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()


def measure(rounds: int = 3, before: str = "", tasks: tuple[str, ...] = tuple(TASKS)) -> dict[str, Any]:
    rng = random.Random(0)
    rows = []
    for task in tasks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            budget = int(run(task, {"memory_budget": 0.9, "verify": False}, None, folder)["half"])
            earlier = Path(before) if before else None
            programs: dict[str, tuple[Mapping[str, Any] | None, Path | None]] = {STOCK: (None, None), FITS: ({}, None)}
            programs[CUT] = {"memory_budget": budget}, None
            if earlier is not None:
                programs[FITS_BEFORE] = {}, earlier
                programs[CUT_BEFORE] = {"memory_budget": budget}, earlier
            found = []
            for _ in range(rounds):
                order = rng.sample([*programs], len(programs))
                found.append({program: run(task, *programs[program], folder) for program in order})
        rows.append(summarize(task, found))
        print(rows[-1], flush=True)
    missed = [
        f"{row['task']}, {program}" for row in rows for program, most in MOST.items() if row["added"][program] > most
    ]
    return {"rows": rows, "rounds": rounds, "before": commit_of(before) if before else "", "missed": missed}


main = benchmark("startup", __doc__, measure, text, quick={"rounds": 1, "tasks": ("LSTM",)})

if __name__ == "__main__":
    raise SystemExit(main())
