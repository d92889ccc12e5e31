"""Take what steps log: through at once if a batch runs whole; else held until all its pieces have run, and merged.

Lightning's ``core/module.py`` (``log``) and ``trainer/connectors/logger_connector/result.py``.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ga.batch.merge import weighted_mean
from lightning_ga.compat import patching

_OF_THE_WINDOW = "on_before_zero_grad", "on_before_optimizer_step", "configure_gradient_clipping"  # hooks, once in it


class LogTap:
    """Takes the place of ``results.log`` (``core/module.py:380``), where all logging ends.

    What an attempt has logged before it failed stays and is not logged again, as its value is that of the whole batch.
    """

    def __init__(self, results: Any) -> None:
        self.results = results
        self.logged: list[tuple[str, str]] = []  # by the current batch
        self.batch_sizes: Mapping[float | None, float] = {}  # constants, and what they count as in this micro-batch
        self._varying: set[str] = set()  # names with a ``batch_size`` that was none of these once
        self.buffer: LogBuffer | None = None  # takes entries instead; ``None`` if they go through
        if results is not None:
            vars(results)["log"] = self

    def log(self, fx: str, name: str, *arguments: Any, **settings: Any) -> None:
        """Log a value; a constant ``batch_size``, that of the recipe, is shared out among its micro-batches."""
        given = settings.get("batch_size")
        if fx in _OF_THE_WINDOW:
            settings["batch_size"] = self.batch_sizes.get(None) if given is None else given
        elif given is not None and self.batch_sizes:
            self._note(name, given)
            settings["batch_size"] = given if name in self._varying else self.batch_sizes.get(given, given)
        if self.results is not None:
            _log(self.results, type(self.results).log, fx, name, *arguments, **settings)

    def __call__(self, fx: str, name: str, *arguments: Any, **settings: Any) -> None:
        """Log a value."""
        if self.buffer is None:
            self.log(fx, name, *arguments, **settings)
            self.logged.append((fx, name))
        elif (fx, name) not in self.logged:
            given = settings.get("batch_size") or 1  # one may count a sample
            self._note(name, given)
            # A number that is that of the piece's samples is counted.
            is_constant = given in self.batch_sizes and given != self.buffer.samples
            counts = True if name in self._varying else False if is_constant and given != 1 else None
            self.buffer.note(fx, name, *arguments, counts=counts, **settings)

    def _note(self, name: str, batch_size: float) -> None:
        """Note that a name comes with a ``batch_size`` that is counted, if it is no constant."""
        if self.batch_sizes and batch_size not in (1, *self.batch_sizes):
            self._varying.add(name)

    def begin(self) -> None:
        """Begin a batch: what it logs goes through."""
        self.logged, self.buffer = [], None

    def held(self, buffer: "LogBuffer") -> AbstractContextManager[None]:
        """Return a context in which values go to a buffer instead."""
        return patching.replaced(self, buffer=buffer)

    def of_batch(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context in which values are those of another batch, by whose size means are weighted."""
        return patching.replaced(self.results, batch=batch, batch_size=None)

    def release(self) -> None:
        """Restore Lightning's own."""
        if self.results is not None:
            vars(self.results).pop("log", None)


def results_of(trainer: Any, stage: str) -> Any:
    """Return where values that are logged in a stage go; ``None`` if the Trainer takes none."""
    return trainer.fit_loop.epoch_loop._results if stage == "training" else trainer._results


def current_hook(module: Any) -> str | None:
    """Return the hook in which ``log`` believes to be called."""
    name: str | None = module._current_fx_name
    return name


def return_to_hook(module: Any, name: str | None) -> None:
    """Let ``log`` know that hooks within one have failed (``trainer/call.py:180`` does so only if they return)."""
    module._current_fx_name = name


def _log(results: Any, log: Callable[..., None], fx: str, name: str, *arguments: Any, **settings: Any) -> None:
    """Log one value; on failure restore the sums of that name (``logger_connector/result.py:234``)."""
    key = f"{fx}.{name}"
    before = [(metric, dict(vars(metric))) for known in (key, f"{key}.0") if (metric := results.get(known))]
    try:
        log(results, fx, name, *arguments, **settings)
    except Exception:
        for metric, values in before:
            vars(metric).update(values)
        for known in [known for known in results if known.startswith(key)] if not before else ():
            del results[known]
        raise
    new = [] if before else [metric for known in (key, f"{key}.0") if (metric := results.get(known)) is not None]
    for metric in new:  # Lightning rounds the mean of whole numbers over ranks, and these may differ in samples here
        if (zero := metric._defaults.get("cumulated_batch_size")) is not None:
            metric._defaults["cumulated_batch_size"] = zero.float()
            metric.cumulated_batch_size = metric.cumulated_batch_size.float()


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of ``log`` in one piece."""

    fx: str  # the hook that it was called in
    name: str
    value: Any  # without a graph
    settings: dict[str, Any]  # all other arguments
    weight: float  # of the piece in means
    samples: int  # of the piece
    counts: bool | None = None  # whether its ``batch_size`` is counted; ``None`` if only other pieces may show that


class LogBuffer:
    """Holds what one batch logs, piece by piece, until it is logged once, as values of the whole batch."""

    def __init__(self) -> None:
        self._pieces: list[list[Entry]] = []
        self._weight, self.samples, self._batch_samples = 1.0, 0, 0  # of the current piece, and of all

    def begin_piece(self, weight: float, samples: int) -> None:
        """Take entries of the next piece, of which these are the weight in means and the samples."""
        self._pieces.append([])
        self._weight, self.samples = weight, samples
        self._batch_samples += samples

    def note(self, fx: str, name: str, value: Any, *, counts: bool | None = None, **settings: Any) -> None:
        """Note an entry of the piece that runs, in place of the trainer's ``log``."""
        self._pieces[-1].append(Entry(fx, name, _detached(value), settings, self._weight, self.samples, counts))

    def replay(self, log: Callable[..., None], run: Callable[[Callable[[], None]], None] = lambda log: log()) -> None:
        """Log each entry once, merged over the pieces: ``run`` calls what logs one entry."""
        batch_samples = self._batch_samples if len(self._pieces) > 1 else None
        groups: dict[tuple[str, str, int], list[Entry]] = {}  # the first of a name in each piece, the second, …
        for piece in self._pieces:
            times: Counter[tuple[str, str]] = Counter()
            for entry in piece:
                name = entry.fx, entry.name
                times[name] += 1
                groups.setdefault((*name, times[name]), []).append(entry)
        for entries in groups.values():
            run(partial(_log_once, log, entries, batch_samples))


def _log_once(log: Callable[..., None], entries: Sequence[Entry], batch_samples: int | None) -> None:
    entry = entries[0] if batch_samples is None else _merged(entries, batch_samples)
    log(entry.fx, entry.name, entry.value, **entry.settings)


def _merged(entries: Sequence[Entry], batch_samples: int) -> Entry:
    """Merge the entries of pieces into one for the batch.

    Sums are added up, and of extremes the extreme is taken. Means are averaged by the pieces' weights, or by
    ``batch_size`` if that counts something else than samples, such as tokens.
    """
    first, samples = entries[0], [entry.samples for entry in entries]
    settings, weights = dict(first.settings), [entry.weight for entry in entries]
    sizes = [size for entry in entries if (size := entry.settings.get("batch_size")) is not None]
    known = {entry.counts for entry in entries}
    if len(sizes) == len(entries) and not (
        known == {False} or (True not in known and _is_constant(sizes, samples, weights, batch_samples))
    ):
        settings["batch_size"] = sum(sizes)
        weights = weights if sizes == samples else sizes
    if isinstance(first.value, Metric):
        return replace(first, settings=settings)
    values = [torch.as_tensor(entry.value) for entry in entries]
    reduce_fx = settings.get("reduce_fx")
    reduce = _EXTENSIVE.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    value = weighted_mean(values, weights) if reduce is None else reduce(torch.stack(values))
    return replace(first, value=value, settings=settings)


# What ``reduce_fx`` may be besides a mean (``_Metadata`` of ``logger_connector/result.py``).
_EXTENSIVE: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.sum),
    **dict.fromkeys(("max", torch.max, max), torch.amax),
    **dict.fromkeys(("min", torch.min, min), torch.amin),
}


def _is_constant(sizes: Sequence[float], samples: Sequence[int], weights: Sequence[float], batch: int) -> bool:
    """Return whether ``batch_size`` is a number that the user wrote, rather than counted in each piece."""
    if len(set(sizes)) > 1:
        return False
    if len(set(samples)) > 1:
        return len(set(weights)) > 1  # what ``normalize`` counts may be as much in pieces of other sizes
    return sizes[0] in (1, batch) and sizes[0] != samples[0]


def _detached(value: Any) -> Any:
    """Return a value without a graph, and as a plain tensor: operations of a subclass may be slow."""
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)
