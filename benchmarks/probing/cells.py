"""One cell: a model in a budget, its true limit, and the limit that every program finds, with its steps."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.output import installed
from benchmarks.probing.devices import CUDA, EMULATED, FAKE, GIB, TRAINER, finish, memory, place
from benchmarks.probing.programs import HIGH, NEEDS, OURS, PEERS, found_by, start_size
from benchmarks.probing.training import MODELS, POOL, Model, Oracle, Samples, Training, runs
from benchmarks.trainers import Module, quiet_trainer
from lightning_ga import AutoAccumulate, UserError
from lightning_ga.memory.live_tensors import uncounted

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
    """Run ours, find the true limit, and run the peers; each on a device and a training of its own."""
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
    """Return the record of a probe in a fit, and the limit of the training that follows it."""
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
    """Count the steps of a program, which may be told by an ``Oracle`` what fits."""
    found, method = found_by(program, training, start, budget)
    return {"found": found, "method": method, **training.counter.counts(), "seconds": None}


def confirmed(make: Callable[[], Training], guess: int) -> int:
    """Find the limit of a new training by steps: this size passes, and one sample more fails."""
    training = make()
    training.step(SMALL)
    return exhaustive(partial(passes, training), guess)


def passes(training: Training, size: int) -> bool:
    """Tell whether a step runs without a retry of the allocator; then every parameter has a gradient, as before."""
    before = retries()
    if runs(partial(training.step, size)) and retries() == before:
        return True
    training.step(SMALL)
    return False


def retries() -> tuple[int, int]:
    """Return how often the current CUDA device's allocator raised an error, and how often it freed its cache first."""
    if not torch.cuda.is_initialized():
        return 0, 0
    seen = torch.cuda.memory_stats()
    return seen["num_ooms"], seen["num_alloc_retries"]


def exhaustive(passes: Callable[[int], bool], guess: int) -> int:
    """Return the largest size that passes while the next one fails, in two steps if the guess is right.

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
    """Return cells with real steps in small budgets, with tensors without values in large ones, and on a CUDA device.

    ``quick`` leaves one cheap budget of every model.

    Examples:
        >>> [(cell.gib, cell.kind) for cell in chosen(cuda=False, quick=True) if cell.model == IN_TRAINER]
        [(0.25, 'emulated'), (16, 'fake'), (0.25, 'trainer')]
    """
    if quick:
        small = [Cell(name, model.quick_gib) for name, model in MODELS.items()]
        return [*small, *cells(MODELS, [16], FAKE), Cell(IN_TRAINER, MODELS[IN_TRAINER].quick_gib, TRAINER)]
    found = [*cells(MODELS, [0.5, 1, 2], EMULATED), *cells(MODELS, [16, 80], FAKE)]
    return [*found, *cells([IN_TRAINER], [0.5, 1, 2], TRAINER), *(cells(MODELS, [2], CUDA) if cuda else [])]


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
    """Tell whether windows of two micro-batches of this size run."""
    settings: dict[str, Any] = {"verify": False, "batch_norm": "ignore", "on_oom": "raise"}
    with memory(EMULATED, budget):
        callback = AutoAccumulate(FACTOR * micro_batch, micro_batch_size=micro_batch, **settings)
        return runs(lambda: _fit(Module, model, callback))


def _fit(kind: type[Module], model: Model, callback: AutoAccumulate) -> None:
    with uncounted():
        data = Pool(model, WINDOWS * EFFECTIVE)
    trainer = quiet_trainer(max_epochs=1, max_steps=WINDOWS, callbacks=[callback])
    trainer.fit(kind(model.build(), ADAM), DataLoader(data, batch_size=FACTOR, collate_fn=on_host))


def on_host(samples: list[Samples]) -> Any:
    """Collate a batch in the host's memory, beside the device that is emulated."""
    with uncounted():
        return default_collate(samples)
