"""Record all that is left of a run, and find where two records differ."""

import hashlib
import logging
import math
import random
import re
import sys
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partialmethod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_ga import AutoAccumulate

CALLBACK_HOOKS = tuple(name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown"))
MODULE_HOOKS = (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_save_checkpoint", "on_load_checkpoint"),
)
"""Hooks of a LightningModule that do nothing unless they are overridden."""
PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(frozen=True)
class Event:
    """One call of a hook."""

    owner: str
    hook: str
    step: int
    values: tuple[Any, ...]


@dataclass
class Journal:
    """The calls of a run, in order, and what can be read from the trainer during them."""

    on_module: bool = False  # whether what checks and trials write into it is put back with their module
    events: list[Event] = field(default_factory=list)
    draws: list[tuple[str, str]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    read: list[dict[str, Any]] = field(default_factory=list)
    rates: list[Any] = field(default_factory=list)
    rates_of_steps: list[Any] = field(default_factory=list)
    steps_of_validations: list[int] = field(default_factory=list)

    def add(self, owner: str, trainer: Any, hook: str, values: tuple[Any, ...]) -> None:
        """Keep one call."""
        frozen = tuple(_essentials(value) for value in values)
        self.events.append(Event(owner, hook, trainer.global_step, frozen))
        if hook in ("on_train_batch_start", "on_train_epoch_start", "on_validation_start", "training_step"):
            self.draws.append((f"{owner}.{hook}", random_state()))


Record = dict[str, Any]
"""All that is left of the run of a scenario."""


class Watcher(pl.Callback):
    """Writes every hook of a callback into a journal, and what it sees of the trainer."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def look(self, trainer: Any, hook: str) -> None:
        """Read what other callbacks may read at that time."""
        if hook == "on_train_batch_end":
            metrics = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
            self.journal.metrics.append(dict(zip(("callback", "logged", "bar"), map(plain, metrics))))
            self.journal.rates.append(_rates(trainer))
        if hook in ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_start"):
            self.journal.batches.append({"hook": hook, **_counters(trainer)})
            self.journal.read.append({"hook": hook, **_read(trainer)})
        if hook == "on_before_optimizer_step":
            self.journal.rates_of_steps.append(_rates(trainer))
        if hook == "on_validation_start" and not trainer.sanity_checking:
            self.journal.steps_of_validations.append(trainer.global_step)


def _watch(self: Watcher, trainer: Any, module: Any, *args: Any, hook: str, **kwargs: Any) -> None:
    self.journal.add("callback", trainer, hook, (*args, *kwargs.values()))
    self.look(trainer, hook)


for _name in CALLBACK_HOOKS:
    setattr(Watcher, _name, partialmethod(_watch, hook=_name))


JOURNALS: WeakKeyDictionary[pl.LightningModule, Journal] = WeakKeyDictionary()
"""Apart from their modules, where all that hangs on them is looked through in each window whose hooks may change it."""


class Told(pl.LightningModule):
    """A module whose hooks write themselves into a journal, where it has one."""

    @property
    def journal(self) -> Journal | None:
        return vars(self).get("_journal", JOURNALS.get(self))

    @journal.setter
    def journal(self, journal: Journal) -> None:
        if journal.on_module:
            vars(self)["_journal"] = journal
        else:
            JOURNALS[self] = journal

    def tell(self, hook: str, *values: Any) -> None:
        """Write one call down."""
        if self.journal is not None:
            self.journal.add("module", self.trainer, hook, values)


def _tell(self: Told, *args: Any, hook: str, **kwargs: Any) -> None:
    self.tell(hook, *args, *kwargs.values())


for _name in MODULE_HOOKS:
    setattr(Told, _name, partialmethod(_tell, hook=_name))


class Rows(CSVLogger):
    """Keeps what it is asked to log, in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="csv", version=0)
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, plain(metrics)))
        super().log_metrics(metrics, step)


@contextmanager
def watched(journal: Journal, folder: Path, ends: list[Record], notes: dict[str, Any]) -> Iterator[list[Record]]:
    """Record what happens in the block; the list holds the record after it."""
    records: list[Record] = []
    _forget_warnings()
    heard = _Heard()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield records
    finally:
        for logger in loggers:
            logger.removeHandler(heard)

    paths = str(folder.resolve()), str(folder)

    def clean(text: str) -> str:
        return text.replace(paths[0], "<folder>").replace(paths[1], "<folder>")

    records.append(
        {
            **{each.name: getattr(journal, each.name) for each in fields(journal) if each.name != "on_module"},
            "ends": [{**end, "callbacks": _cleaned(end["callbacks"], clean)} for end in ends],
            "rows": notes.pop("rows"),
            "warnings": frozenset((each.category.__name__, clean(str(each.message))) for each in told if _counts(each)),
            "messages": [clean(message) for message in heard.messages],
            "checkpoints": {name: _cleaned(content, clean) for name, content in _checkpoints(folder).items()},
            "files": {str(path.relative_to(folder)): clean(path.read_text()) for path in _texts(folder)},
            "notes": _cleaned(plain(notes), clean),
        }
    )


def end_of(trainer: Any, module: pl.LightningModule, result: Any = None) -> Record:
    """Read all that one call of ``fit``, ``validate``, ``test`` or ``predict`` has left."""
    loops = {name: getattr(trainer, f"{name}_loop").state_dict() for name in ("fit", "validate", "test", "predict")}
    return {
        "state": plain(module.state_dict()),
        "optimizers": [plain(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedulers": [plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "scaler": plain(getattr(trainer.precision_plugin, "state_dict", dict)()),
        "callback_metrics": plain(trainer.callback_metrics),
        "logged_metrics": plain(trainer.logged_metrics),
        "loops": plain(loops),
        "counters": {
            **_counters(trainer),
            "batches_that_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "should_stop": trainer.should_stop,
            "frequencies": [config.frequency for config in trainer.lr_scheduler_configs],
            "state": (str(trainer.state.status), str(trainer.state.fn)),
            "training": [each.training for each in module.modules()],
            "frozen": [parameter.requires_grad for parameter in module.parameters()],
            "hooks": [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()],
        },
        "callbacks": {
            each.state_key: plain(each.state_dict())
            for each in trainer.callbacks
            if not isinstance(each, (AutoAccumulate, Watcher))
        },
        "random": random_state(),
        "draw": (torch.rand(2).tolist(), random.random(), float(np.random.rand())),
        "result": plain(result),
    }


def random_state() -> str:
    """The state of all generators of random numbers, in short."""
    digest = hashlib.md5(torch.get_rng_state().numpy().tobytes())
    name, keys, *rest = np.random.get_state()
    digest.update(keys.tobytes() + repr((name, rest)).encode())
    version, words, pair = random.getstate()
    digest.update(array("L", words).tobytes() + repr((version, pair)).encode())
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """A copy that later steps do not change, with the type of each part."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value).__name__, *map(plain, value))
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return type(value)(map(plain, parts)) if isinstance(value, (list, tuple)) else list(map(plain, parts))
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **{each.name: plain(getattr(value, each.name)) for each in fields(value)}}
    if isinstance(value, tuple(PLAIN)):
        return value
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def differences(ours: Any, stock: Any, tolerance: float = 0.0, where: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two records differ, ours and stock's there; bit for bit where the tolerance is 0."""
    if type(ours) is type(stock) and type(stock) in PLAIN and ours == stock:
        return
    floats = _are_numbers(ours, stock) and (isinstance(ours, float) or isinstance(stock, float))
    if tolerance and floats:
        if not _same_number(ours, stock, tolerance):
            yield where, repr(ours), repr(stock)
    elif type(ours) is not type(stock):
        yield f"{where}.type", f"{type(ours).__name__} {_short(ours)}", f"{type(stock).__name__} {_short(stock)}"
    elif is_dataclass(stock):
        for each in fields(stock):
            at = f"{where}.{each.name}"
            yield from differences(getattr(ours, each.name), getattr(stock, each.name), tolerance, at)
    elif isinstance(stock, torch.Tensor):
        if not _same_tensor(ours, stock, tolerance):
            yield where, _short(ours), _short(stock)
    elif isinstance(stock, dict):
        if list(map(str, ours)) != list(map(str, stock)):
            yield f"{where}.keys", _short(list(ours)), _short(list(stock))
        for key in [key for key in stock if key in ours]:
            yield from differences(ours[key], stock[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(stock, (list, tuple)):
        if len(ours) != len(stock):
            yield f"{where}.length", str(len(ours)), str(len(stock))
        for n, (a, b) in enumerate(zip(ours, stock)):
            yield from differences(a, b, tolerance, f"{where}[{n}]")
    elif isinstance(stock, frozenset):
        for each in sorted(ours - stock, key=str):
            yield where, str(each), "nothing"
        for each in sorted(stock - ours, key=str):
            yield where, "nothing", str(each)
    elif not (_same_number(ours, stock, 0.0) if floats else _rounded(ours, tolerance) == _rounded(stock, tolerance)):
        yield where, _short(ours), _short(stock)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _rounded(value: Any, tolerance: float) -> Any:
    """A text whose decimal fractions are cut short, where there is a tolerance."""
    return re.sub(r"(\d\.\d{6})\d+", r"\1", value) if tolerance and isinstance(value, str) else value


def _same_number(ours: float, stock: float, tolerance: float) -> bool:
    if math.isnan(stock) or math.isnan(ours):
        return math.isnan(stock) and math.isnan(ours)
    return ours == stock or (tolerance > 0 and math.isclose(ours, stock, rel_tol=tolerance, abs_tol=tolerance))


def _same_tensor(ours: torch.Tensor, stock: torch.Tensor, tolerance: float) -> bool:
    if ours.dtype != stock.dtype or ours.shape != stock.shape or ours.device != stock.device:
        return False
    if not stock.dtype.is_floating_point or tolerance == 0:
        return torch.equal(ours.nan_to_num(7e7), stock.nan_to_num(7e7))
    return torch.allclose(ours, stock, rtol=tolerance, atol=tolerance, equal_nan=True)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 300 else f"{text[:300]}…"


def _essentials(value: Any) -> Any:
    """What a hook is given; of a checkpoint only what it is made of, of an optimizer its type."""
    if isinstance(value, dict) and "pytorch-lightning_version" in value:
        parts = {key: sorted(map(str, part)) for key, part in value.items() if isinstance(part, dict)}
        parts.pop("callbacks", None)
        return {"epoch": value["epoch"], "global_step": value["global_step"], "keys": list(value), **parts}
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return plain(value)


def _rates(trainer: Any) -> list[list[float]]:
    return [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def _counters(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop.epoch_loop
    return {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "epochs": plain(trainer.fit_loop.epoch_progress.state_dict()),
        "batches": plain(loop.batch_progress.state_dict()),
        "optimizer": plain(loop.automatic_optimization.optim_progress.state_dict()),
        "schedulers": plain(loop.scheduler_progress.state_dict()),
        "validated": plain(loop.val_loop.batch_progress.state_dict()),
        "is_last_batch": trainer.is_last_batch,
        "training_batches": trainer.num_training_batches,
        "validation_batches": plain(trainer.num_val_batches),
        "factor": trainer.accumulate_grad_batches,
        "estimate": _estimate(trainer),
    }


def _estimate(trainer: Any) -> float | None:
    """What a schedule is made with; asking for it may load data anew, where they are loaded every few epochs."""
    if trainer.fit_loop._combined_loader is None or trainer.reload_dataloaders_every_n_epochs:
        return None
    return trainer.estimated_stepping_batches


def _read(trainer: Any) -> dict[str, Any]:
    """What users may read of the trainer that says nothing of the training's course."""
    loader = trainer.train_dataloader
    kind = torch.utils.data.DataLoader
    return {
        "val_check_batch": getattr(trainer, "val_check_batch", None),
        "train_dataloader": _loader(loader) if isinstance(loader, kind) else type(loader).__name__,
    }


def _loader(loader: Any) -> dict[str, Any]:
    try:
        length = len(loader)
    except TypeError:
        length = None
    return {"length": length, "batch_size": loader.batch_size, "workers": loader.num_workers}


def _counts(each: warnings.WarningMessage) -> bool:
    return not issubclass(each.category, ResourceWarning)


def _forget_warnings() -> None:
    """Let Lightning say again what it says once a process."""
    for each in _caches():
        each.clear()


@cache
def _caches() -> list[WarningCache]:
    modules = [module for name, module in sys.modules.items() if name.startswith(("lightning.", "lightning_ga"))]
    owners = [each for m in modules for each in (m, *(value for value in vars(m).values() if isinstance(value, type)))]
    return [each for owner in owners for each in vars(owner).values() if isinstance(each, WarningCache)]


class _Heard(logging.Handler):
    """Keeps what Lightning says, but for what the callback says of itself and tables with times."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.startswith("AutoAccumulate") and "Profiler Report" not in message:
            self.messages.append(message)


def _checkpoints(folder: Path) -> dict[str, Any]:
    """The checkpoints in a folder, without the callback's own entry."""
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        content = torch.load(path, weights_only=False)
        content.get("callbacks", {}).pop("AutoAccumulate", None)
        found[str(path.relative_to(folder))] = plain(content)
    return found


def _texts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".csv", ".yaml", ".txt"))


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_cleaned(key, clean): _cleaned(part, clean) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cleaned(part, clean) for part in value)
    return value
