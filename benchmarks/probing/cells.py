"""One cell: a model in a budget, its true limit, and what every program finds in how many steps."""

import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.output import installed
from benchmarks.probing.devices import CUDA, EMULATED, FAKE, GIB, TRAINER, finish, memory, place
from benchmarks.probing.programs import HIGH, NEEDS, OURS, PEERS, found_by, start_size
from benchmarks.probing.training import MODELS, POOL, Model, Oracle, Samples, Training
from benchmarks.trainers import Module, quiet_trainer
from lightning_ga import AutoAccumulate, UserError
from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.live_tensors import LiveTensorMeter, uncounted
from lightning_ga.memory.oom import attempt
from lightning_ga.testing import limit_memory, out_of_memory_at

IN_TRAINER = "GPT, SDPA"  # the model whose limit is also searched for in a Trainer
SMALL = 2  # samples of a step that only warms up
PEERS_TO_GIB = 8.0  # largest budget in which peers compute on a GPU: dozens of steps at the limit take minutes
EFFECTIVE = 2**13  # samples of a window that is probed: far above the limits
FACTOR, WINDOWS = 2, 2  # of the training that tries a limit
ADAM = partial(torch.optim.Adam, foreach=True)


@dataclass(frozen=True, slots=True)
class Cell:
    model: str
    gib: float
    kind: str = EMULATED

    @property
    def budget(self) -> int:
        return int(self.gib * GIB)


def measured(cell: Cell) -> dict[str, Any]:
    """Ours, the true limit, and the peers; each on a device and a training of its own."""
    if cell.kind == TRAINER:
        return measured_in_trainer(cell)
    record: dict[str, Any] = {**asdict(cell), "limit": None, "programs": {}}
    make = partial(Training, MODELS[cell.model], place(cell.kind))
    if cell.kind != FAKE:  # a small step without a limit, so that no program pays for what a process does once
        make().step(SMALL)
    try:
        record["programs"][OURS] = run(cell, OURS, HIGH)
    except (UserError, torch.OutOfMemoryError) as refusal:  # the second where the model alone does not fit
        return {**record, "refusal": str(refusal)}
    with memory(cell.kind, cell.budget):
        limit = record["limit"] = confirmed(make, record["programs"][OURS]["found"])
    start, small = start_size(limit), MODELS[cell.model].peers_to_gib
    most = {CUDA: PEERS_TO_GIB, EMULATED: small}.get(cell.kind, 0.0)  # GiB in which peers compute
    for name in (name for name in PEERS if name not in NEEDS or installed(NEEDS[name])):
        record["programs"][name] = run(cell, name, start) if cell.gib <= most else count(name, Oracle(limit), start)
    return record


def measured_in_trainer(cell: Cell) -> dict[str, Any]:
    """The probe of a fit, as it reports on itself, and the limit of the training that follows it."""
    model = MODELS[cell.model]
    with memory(EMULATED, cell.budget):
        callback = AutoAccumulate(EFFECTIVE, verify=False, batch_norm="ignore", cache=False)
        _fit(ProbeOnly, model, callback)
    found = callback.probe
    assert found is not None, "a budget was given"
    counts = {"trials": len(found.trials), "steps": found.steps, "ooms": sum(not trial.fits for trial in found.trials)}
    outcome = {"found": found.limit, "method": found.method, **counts, "seconds": found.seconds}
    limit = exhaustive(partial(trains, model, cell.budget), found.limit)
    return {**asdict(cell), "limit": limit, "programs": {OURS: outcome}}


def run(cell: Cell, program: str, start: int) -> dict[str, Any]:
    with memory(cell.kind, cell.budget):
        training = Training(MODELS[cell.model], place(cell.kind))
        begun = time.perf_counter()
        outcome = count(program, training, start, cell.budget)
        finish()
        seconds = time.perf_counter() - begun
        del training
    return {**outcome, "seconds": None if cell.kind == FAKE else seconds}


def count(program: str, training: Training, start: int, budget: int = 0) -> dict[str, Any]:
    """Count the steps of a program, which may run on a device whose limit is known, where nothing is computed."""
    found, method = found_by(program, training, start, budget)
    return {"found": found, "method": method, **training.counter.counts(), "seconds": None}


def confirmed(make: Callable[[], Training], guess: int) -> int:
    """The limit of a new training by trial: steps of this size pass and steps of one sample more fail."""
    gc.collect()
    torch.cuda.empty_cache()
    training = make()
    training.step(SMALL)
    return exhaustive(partial(passes, training), guess)


def passes(training: Training, size: int) -> bool:
    """Whether a step runs; afterwards its memory is free and every parameter has a gradient, as before."""
    device = training.samples[0].device
    meter = AllocatorMeter(device) if device.type == "cuda" else None
    if meter is not None:
        meter.start()
    failed = attempt(lambda: training.step(size)).failure is not None
    if not failed and (meter is None or meter.finish()[1]):
        return True
    training.step(SMALL)
    return False


def exhaustive(passes: Callable[[int], bool], guess: int) -> int:
    """Largest size that passes while the next one fails: two steps if the guess is right.

    Examples:
        >>> tried = []
        >>> exhaustive(lambda size: tried.append(size) or size <= 23, 23), tried
        (23, [23, 24])
        >>> exhaustive(lambda size: size <= 23, 9), exhaustive(lambda size: size <= 23, 70)
        (23, 23)
    """
    low, high, stride = 0, 0, 1
    size = guess
    while not high or high - low > 1:
        if passes(size):
            low = size
            size = low + stride if not high else (low + high) // 2
        else:
            high = size
            size = max(low + 1, high - stride) if not low else (low + high) // 2
        stride *= 2
    return low


def cells(models: Iterable[str], budgets: Iterable[float], kind: str) -> list[Cell]:
    return [Cell(model, gib, kind) for model in models for gib in budgets]


def chosen(*, cuda: bool, quick: bool = False) -> list[Cell]:
    """Real steps in small budgets, tensors without values in large ones, a CUDA device if there is one.

    ``quick``: one cheap budget of every model on every device.

    Examples:
        >>> [(cell.gib, cell.kind) for cell in chosen(cuda=False, quick=True) if cell.model == IN_TRAINER]
        [(0.25, 'emulated'), (16, 'fake'), (0.25, 'trainer')]
    """
    found = [*cells(MODELS, [0.5, 1, 2], EMULATED), *cells(MODELS, [16, 80], FAKE)]
    found += [*cells([IN_TRAINER], [0.5, 1, 2], TRAINER), *(cells(MODELS, [2], CUDA) if cuda else [])]
    if not quick:
        return found
    least = {(cell.model, cell.kind): cell for cell in reversed(found)}
    small = {key: MODELS[cell.model].quick_gib for key, cell in least.items() if cell.kind in (EMULATED, TRAINER)}
    return [replace(cell, gib=small.get(key, cell.gib)) for key, cell in reversed(least.items())]


def emulation_cost(rounds: int = 50) -> dict[str, Any]:
    """What a small step takes longer than without a limit, for each operation in it: the fastest of some rounds."""
    training, meter = Training(MODELS[IN_TRAINER]), LiveTensorMeter()
    training.step(SMALL)
    with out_of_memory_at(0) as counter:
        training.step(SMALL)
    plain, limited, recorded = [], [], []
    for _ in range(rounds):
        plain.append(_seconds(training, nullcontext()))
        limited.append(_seconds(training, limit_memory("1 TiB", resident=training.resident())))
        meter.start(record=True)
        recorded.append(_seconds(training, meter))
    limit_us, trace_us = (1e6 * (min(each) - min(plain)) / counter.operations for each in (limited, recorded))
    return {"model": IN_TRAINER, "operations": counter.operations, "limit_us": limit_us, "trace_us": trace_us}


def _seconds(training: Training, context: Any) -> float:
    with context:
        start = time.perf_counter()
        training.step(SMALL)
        return time.perf_counter() - start


class Pool(Dataset[Samples]):
    """A dataset of any length from a few samples."""

    def __init__(self, model: Model, count: int, device: str = "cpu") -> None:
        with torch.device(device):
            self.samples = model.samples()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Samples:
        return tuple(tensor[index % POOL] for tensor in self.samples)


class ProbeOnly(Module):
    """A module whose fit ends once the probe is through."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def trains(model: Model, budget: int, micro_batch: int) -> bool:
    """Whether windows of two micro-batches of this size run."""
    settings: dict[str, Any] = {"verify": False, "batch_norm": "ignore", "on_oom": "raise"}
    with memory(EMULATED, budget):
        callback = AutoAccumulate(FACTOR * micro_batch, micro_batch_size=micro_batch, **settings)
        return attempt(lambda: _fit(Module, model, callback)).failure is None


def _fit(kind: type[Module], model: Model, callback: AutoAccumulate) -> None:
    with uncounted():
        data = Pool(model, WINDOWS * EFFECTIVE)
    trainer = quiet_trainer(max_epochs=1, max_steps=WINDOWS, callbacks=[callback])
    trainer.fit(kind(model.build(), ADAM), DataLoader(data, batch_size=FACTOR, collate_fn=on_host))


def on_host(samples: list[Samples]) -> Any:
    """A batch in the host's memory, beside the device that is emulated."""
    with uncounted():
        return default_collate(samples)
