"""Which budgets does a step fit with submodules computed again, at what price? ``python -m benchmarks.checkpointing``.

For each model and budget, the package chooses submodules from a survey and trial steps, as for a training. Peaks are
those of live tensors, to the byte. Processor time is a median over rounds in which all sets run one step each, in turn.
PyTorch's own wrapper, ``apply_activation_checkpointing``, gets the set of all candidates.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from benchmarks.output import Record, benchmark, shown
from benchmarks.recomputation import HELD_BACK, MODELS, Model
from lightning_ga import recomputed
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.recompute.choice import PARTS, Candidate, choose
from lightning_ga.recompute.survey import survey

BUDGETS = (0.75, 0.5, 0.3)
REACHED = {"GPT": (0.75, 0.5, 0.3), "ViT-Ti": (0.75, 0.5), "DenseNet-121": (0.75,), "U-Net": (0.75,)}
REACHED |= {"two towers": (0.75, 0.5), "4 LSTMs": (0.75, 0.5)}
AT_MOST_GPT, AT_MOST_TORCH = 1.25, 1.02  # times the plain step at half of the peak; times PyTorch's wrapper
FEW = 2  # samples of the comparison


def made(name: str) -> Model:
    torch.manual_seed(0)
    return {**MODELS, **HELD_BACK}[name]()


def peak_of(model: Model, names: Iterable[str] = ()) -> int:
    gc.collect()
    model.optimizer.zero_grad()
    meter = LiveTensorMeter()
    meter.add([*model.parameters(), *model.buffers()])
    with recomputed(model, names), meter:
        model.step()
    return meter.peak_bytes


def least_set(model: Model, root: Candidate) -> tuple[str, ...]:
    """Return the set of all candidates whose peak is lower: small ones, or large ones."""
    sets = [tuple(root.chosen(root.frees / part)) for part in PARTS]
    return min(sets, key=partial(peak_of, model))


def of_budget(model: Model, root: Candidate, plain: int, part: float) -> dict[str, Any]:
    budget = int(part * plain)

    def run(names: tuple[str, ...]) -> int | None:
        peak = peak_of(model, names)
        return peak if peak <= budget else None

    found = choose(root, run, budget)
    cell = {"budget": part, "fits": bool(found.names), "names": found.names, "trials": len(found.trials)}
    return cell | {"peak": (found.peak_bytes or 0) / plain, "again": found.share}


def by_torch(name: str, names: Sequence[str]) -> Model | None:
    """Return the model with PyTorch's wrappers; ``None`` if a step fails."""
    model = made(name)
    parts = {model.get_submodule(each) for each in names}
    apply_activation_checkpointing(model, check_fn=parts.__contains__)
    try:
        model.step()
    except (RuntimeError, TypeError):
        return None
    return model


def times(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for number in range(rounds + 3):
        for name in order.sample([*steps], len(steps)):
            started = time.process_time()
            steps[name]()
            if number >= 3:  # the first calls look at all that a forward pass may change
                found[name].append(time.process_time() - started)
    return found


def ratio(found: Mapping[str, Sequence[float]], name: str, beside: str) -> float:
    return round(statistics.median(a / b for a, b in zip(found[name], found[beside])), 4)


def of_model(name: str, rounds: int) -> dict[str, Any]:
    model = made(name)
    plain = peak_of(model)
    gradient = model.gradient()
    root = survey(model, model.step, partial(model.step, FEW))
    every = least_set(model, root)
    cells = [of_budget(model, root, plain, part) for part in BUDGETS]
    sets = {str(cell["budget"]): cell["names"] for cell in cells if cell["fits"]} | {"all": every}
    peer = by_torch(name, every)
    with ExitStack() as stack:
        steps: dict[str, Callable[[], object]] = {"plain": model.step}
        same = True
        for key, names in sets.items():
            other = made(name)
            stack.enter_context(recomputed(other, names))
            same = same and all(map(torch.equal, gradient, other.gradient()))
            steps[key] = other.step
        if peer is not None:
            steps["torch"] = peer.step
        found = times(steps, rounds)
    for cell in cells:
        cell["time"] = ratio(found, str(cell["budget"]), "plain") if cell["fits"] else None
    return {
        "model": name,
        "samples": model.samples,
        "plain_bytes": plain,
        "same_gradient": same,
        "cells": cells,
        "all": {"names": every, "peak": peak_of(model, every) / plain, "time": ratio(found, "all", "plain")},
        "all_beside_torch": None if peer is None else ratio(found, "all", "torch"),
    }


def missed(rows: Sequence[Record]) -> list[str]:
    """Return the targets that are missed.

    Examples:
        >>> cell = {"budget": 0.5, "fits": True, "time": 1.3}
        >>> missed([{"model": "GPT", "same_gradient": True, "cells": [cell], "all_beside_torch": 1.01}])
        ['GPT: 1.3 times the plain step at 50 %']
    """
    found = []
    for row in rows:
        for cell in row["cells"]:
            if not cell["fits"] and cell["budget"] in REACHED.get(row["model"], ()):
                found.append(f"{row['model']}: nothing fits {cell['budget']:.0%}")
            if row["model"] == "GPT" and cell["budget"] == 0.5 and cell["fits"] and cell["time"] > AT_MOST_GPT:
                found.append(f"GPT: {cell['time']} times the plain step at 50 %")
        if row["all_beside_torch"] is not None and row["all_beside_torch"] > AT_MOST_TORCH:
            found.append(f"{row['model']}: {row['all_beside_torch']} times PyTorch's wrapper")
        if not row["same_gradient"]:
            found.append(f"{row['model']}: another gradient")
    return found


def text(record: Record) -> str:
    lines = []
    for row in record["rows"]:
        for cell in row["cells"]:
            budget = f"{cell['budget']:.0%}"
            if cell["fits"]:
                numbers = (f"{cell['peak']:.3f}", f"{cell['again']:.2f}", f"{cell['time']:.2f}")
                lines.append((row["model"], budget, *numbers, str(cell["trials"]), ""))
            else:
                lines.append((row["model"], budget, "none", "", "", str(cell["trials"]), ""))
        beside = "fails" if row["all_beside_torch"] is None else f"{row['all_beside_torch']:.3f}"
        lines.append((row["model"], "all", f"{row['all']['peak']:.3f}", "", f"{row['all']['time']:.2f}", "", beside))
    return shown(
        ("model", "budget"),
        ("peak", "again", "time", "trials", "÷ torch"),
        lines,
        "Budget and peak as shares of the plain step's peak; the part of the forward pass that runs again; processor "
        "time beside the plain step; trial steps. All: every candidate is computed again, beside "
        "same set under PyTorch's apply_activation_checkpointing. The last "
        f"{len(HELD_BACK)} models were held back while the rules were made. Medians of {record['rounds']} rounds, one "
        f"thread; load average {record['load_average']:.1f}.",
    )


def measure(rounds: int = 15, models: tuple[str, ...] = (*MODELS, *HELD_BACK)) -> dict[str, Any]:
    gc.disable()  # so that every step releases memory at the same places
    rows = [of_model(name, rounds) for name in models]
    return {"rounds": rounds, "rows": rows, "missed": missed(rows)}


main = benchmark("checkpointing", __doc__, measure, text, quick={"rounds": 1, "models": ("GPT",)})

if __name__ == "__main__":
    raise SystemExit(main())
