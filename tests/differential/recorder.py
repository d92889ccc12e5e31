"""Record what is left of a run, and find where two records differ."""

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_ga import AutoAccumulate

LOOKING = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
)
BY_PIECE = {"training_step", "on_before_backward", "on_after_backward", "on_before_batch_transfer"}
BY_PIECE |= {"transfer_batch_to_device", "on_after_batch_transfer"}
BY_BATCH = {"on_train_batch_start", "on_train_batch_end", "on_save_checkpoint"}  # whose files are compared
PLAIN = (type(None), bool, int, float, str, bytes)
Record = dict[str, Any]


class Journal:
    """The calls of a run in their order, with what can be read from the trainer in some of them."""

    def __init__(self) -> None:
        self.calls: list[Record] = []
        self.rates: list[Any] = []  # of each optimizer step
        self.validations: list[int] = []  # optimizer steps before each
        self.ends_of_windows: list[int] = []  # the same, as the window that each comes in has ended

    def __deepcopy__(self, memo: Any) -> "Journal":
        return Journal()  # for trials, which are not recorded, a copy of all calls would take longer than the training

    def add(self, trainer: Any, name: str, *values: Any) -> None:
        call = {"call": name, "step": trainer.global_step, "values": [_essentials(value) for value in values]}
        if name in LOOKING:
            call |= {"random": random_state(), "counters": _counters(trainer), "metrics": _metrics(trainer)}
        if name == "on_before_optimizer_step":
            self.rates.append([[group["lr"] for group in each.param_groups] for each in trainer.optimizers])
        if name == "on_validation_start" and not trainer.sanity_checking:
            self.validations.append(trainer.global_step)
            self.ends_of_windows.append(trainer.global_step + trainer.fit_loop.epoch_loop._should_accumulate())
        self.calls.append(call)


class Watcher(pl.Callback):
    """Writes every hook of a callback into a journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def _watch(self, trainer: Any, module: Any, *values: Any, hook: str, **named: Any) -> None:
        self.journal.add(trainer, hook, *values, *named.values())


for _name in [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]:
    setattr(Watcher, _name, partialmethod(Watcher._watch, hook=_name))


class Rows(DummyLogger):
    """Keeps what is logged, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, plain(metrics)))


def end_of(trainer: Any, module: pl.LightningModule, result: Any = None) -> Record:
    """Read what one call of ``fit``, ``validate``, ``test`` or ``predict`` has left."""
    loops = [getattr(trainer, f"{name}_loop").state_dict() for name in ("validate", "test", "predict")]
    others = [each for each in trainer.callbacks if not isinstance(each, (AutoAccumulate, Watcher))]
    return {
        "state": plain(module.state_dict()),
        "optimizers": [plain(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedulers": [plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "scaler": plain(getattr(trainer.precision_plugin, "state_dict", dict)()),
        "metrics": _metrics(trainer),
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "callbacks": {each.state_key: plain(each.state_dict()) for each in others},
        "result": plain(result),
        "around": {
            "loops": plain(loops),
            "counters": _counters(trainer),
            "batches_that_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "stopped": (trainer.should_stop, str(trainer.state.status), str(trainer.state.fn)),
            "frequencies": [config.frequency for config in trainer.lr_scheduler_configs],
            "trained": [parameter.requires_grad for parameter in module.parameters()],
        },
        "random": random_state(),
    }


def checkpoints(folder: Path) -> dict[str, Any]:
    """Read the checkpoints in a folder, without the callback's own entry."""
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        content = torch.load(path, weights_only=False)
        content["callbacks"].pop("AutoAccumulate", None)
        found[str(path.relative_to(folder))] = plain(content)
    return found


def promised(record: Record, *, in_step: bool, failed: bool) -> Record:
    """What records of whole batches and of cut ones have in common.

    If the step cuts, what is around it sees whole batches; after an error hooks of earlier passes have run again.
    """
    whole = in_step and not failed
    left_out = {"random"} | ({"around", "callbacks", "result"} if failed else set() if whole else {"around"})
    calls = [call for call in record["calls"] if call["call"] not in BY_PIECE]
    if not whole:
        hooks = [] if failed else [call for call in calls if call["call"] not in BY_BATCH]
        calls = [{"call": call["call"], "step": call["step"]} for call in hooks]
    ends = [{**_without(each, *left_out), "metrics": _means(each["metrics"], whole)} for each in record["ends"]]
    kept = ("state_dict", "epoch", "global_step")
    return {
        "rates": record["rates"],
        "validations": record["validations"],
        "estimates": [call["counters"]["estimate"] for call in record["calls"] if call["call"] == "on_train_start"],
        "ends": ends,
        "rows": [(step, _means(values, whole)) for step, values in record["rows"] if "oom_events" not in values],
        "checkpoints": {path: {key: file[key] for key in kept} for path, file in record["checkpoints"].items()},
        "notes": {} if failed else record["notes"],
        "calls": [_without(call, "random") for call in calls],
    }


def rounded(record: Record) -> Record:
    """The same of records whose validations are due at ends of windows, though the recipe asks for them within."""
    kept = ("state", "optimizers", "schedulers", "global_step", "current_epoch")
    return {
        "ends": [{name: end[name] for name in kept} for end in record["ends"]],
        "rates": record["rates"],
        "validations": sorted(set(record["ends_of_windows"])),
    }


def outcome(record: Record) -> Record:
    """What the last training of a run comes to, in however many fits."""
    end = _without(record["ends"][-1], "around", "callbacks", "result", "random", "scaler")
    return {**end, "metrics": _means(end["metrics"]["callback"])}


def without_step_values(record: Any) -> Any:
    """The same of records whose windows are several batches: what is logged by step is the window's on purpose."""
    if isinstance(record, (list, tuple)):
        return [without_step_values(each) for each in record]
    if not isinstance(record, dict):
        return record
    kept = _means(record) if any(str(name).endswith("_step") for name in record) else record
    return {name: without_step_values(value) for name, value in kept.items()}


def _means(values: Any, by_step: bool = False) -> Any:
    """Logged values; those by step are of a micro-batch where the loader yields these."""
    if by_step or not isinstance(values, dict):
        return values
    steps = {name for name in values if name.endswith("_step")} - {"global_step"}
    steps |= {name.removesuffix("_step") for name in steps}  # the last step's, until the epoch ends
    return {name: _means(value) for name, value in values.items() if name not in steps}


def _without(values: Record, *names: str) -> Record:
    return {name: value for name, value in values.items() if name not in names}


def random_state() -> str:
    """Return the state of all generators of random numbers, in short."""
    state = torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode()
    name, keys, *rest = np.random.get_state()
    return hashlib.md5(state + keys.tobytes() + repr((name, rest)).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Return a copy that later steps do not change."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return torch.as_tensor(value).detach().clone()
    if is_dataclass(value) and not isinstance(value, type):
        return plain({each.name: getattr(value, each.name) for each in fields(value)})
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value if isinstance(value, PLAIN) else str(type(value))


def differences(ours: Any, stock: Any, tolerance: float = 0.0, where: str = "") -> Iterator[str]:
    """Yield where two records differ, with both values; bit for bit if the tolerance is 0."""
    if type(ours) is type(stock) and isinstance(stock, dict):
        if list(map(str, ours)) != list(map(str, stock)):
            yield f"{where}: keys {list(ours)} instead of {list(stock)}"
        for key in [key for key in stock if key in ours]:
            yield from differences(ours[key], stock[key], tolerance, f"{where}[{key!r}]")
    elif type(ours) is type(stock) and isinstance(stock, (list, tuple)):
        if len(ours) != len(stock):
            yield f"{where}: {len(ours)} instead of {len(stock)}"
        for place, (one, other) in enumerate(zip(ours, stock)):
            yield from differences(one, other, tolerance, f"{where}[{place}]")
    elif not _same(ours, stock, tolerance):
        yield " ".join(f"{where}: {ours!r} instead of {stock!r}".split())[:400]


def _same(ours: Any, stock: Any, tolerance: float) -> bool:
    if type(ours) is not type(stock):
        return False
    if isinstance(stock, float):
        unknown = math.isnan(ours) and math.isnan(stock)
        return unknown or math.isclose(ours, stock, rel_tol=tolerance, abs_tol=tolerance)
    if not isinstance(stock, torch.Tensor):
        rounded = [
            re.sub(r"(\.\d{6})\d+", r"\1", each) if tolerance and isinstance(each, str) else each
            for each in (ours, stock)
        ]
        return bool(rounded[0] == rounded[1])
    if (ours.dtype, ours.shape, ours.device) != (stock.dtype, stock.shape, stock.device):
        return False
    one, other = (ours, stock) if stock.dtype.is_floating_point else (ours.double(), stock.double())
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _essentials(value: Any) -> Any:
    """What a hook is given; of a checkpoint only what it is made of."""
    if isinstance(value, dict) and "pytorch-lightning_version" in value:
        return {"epoch": value["epoch"], "global_step": value["global_step"], "keys": list(value)}
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else plain(value)


def _metrics(trainer: Any) -> Record:
    return {name: plain(getattr(trainer, f"{name}_metrics")) for name in ("callback", "logged", "progress_bar")}


def _counters(trainer: Any) -> Record:
    loader = trainer.train_dataloader
    is_ready = trainer.fit_loop._combined_loader is not None and not trainer.reload_dataloaders_every_n_epochs
    return {
        "loop": plain(trainer.fit_loop.state_dict()),
        "is_last_batch": trainer.is_last_batch,
        "training_batches": trainer.num_training_batches,
        "validation_batches": plain(trainer.num_val_batches),
        "validates": getattr(trainer, "val_check_batch", None),
        "factor": trainer.accumulate_grad_batches,
        "estimate": trainer.estimated_stepping_batches if is_ready else None,  # asking may load data
        "loader": [getattr(loader, name, None) for name in ("batch_size", "num_workers", "drop_last")],
    }
