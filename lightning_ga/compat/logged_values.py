"""Log one value an optimizer step: merge the values that the micro-batches of a window, or pieces of a batch, log.

Lightning shows and writes the value of a window's last micro-batch alone (``update_train_step_metrics`` in
``trainer/connectors/logger_connector/logger_connector.py``, 2.6.6). What it shows is the ``_forward_cache`` of a
``_ResultMetric`` (``result.py`` beside it), and of a torchmetrics ``Metric`` (``metric.py``, 1.4 to 1.9): there the
window's value is put. What is collected for an epoch stays Lightning's.

All logging ends in ``log`` of the running loop's results (``result.py``), which also counts the samples of
``results.batch``: there lies the whole batch, even if it runs in pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ga.compat import ranks
from lightning_ga.compat.loop_counters import LoopReader
from lightning_ga.compat.patching import replaced, shadowed
from lightning_ga.snapshot.copies import metric_state

# By the name of ``reduce_fx``, a function or a text (``_Metadata`` in Lightning's ``result.py``); else a mean.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
Settings = dict[str, Any]  # arguments of ``log``


@dataclass(frozen=True, slots=True)
class Counted:
    """What has been counted in a batch of the loop."""

    samples: int = 0
    items: float = 0.0  # what ``normalize=`` counts; else samples
    pass_samples: int = 0  # of the latest pass


class Logged(NamedTuple):
    """What one pass has logged by some name, and what it weighs."""

    value: Any  # a tensor of one element, or a metric
    settings: Settings
    samples: int
    weight: float  # in means over all passes
    units: int = 0  # of a piece, the greatest common divisor of its loaders' samples; else 0


class StepValues:
    """Puts the window's value in the place of its last micro-batch's, in windows of several passes or ranks.

    While a window runs, the value of the window before is shown; in an epoch's first window, that of its latest
    micro-batch. Ranks exchange values (``sync_dist``) where the last micro-batch logs them, each once: if that
    micro-batch fails, and the rank runs the window again alone, it uses what has arrived.
    """

    def __init__(
        self,
        trainer: Any,
        place: LoopReader,
        counted: Callable[[], Counted],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._trainer = trainer
        self._place = place
        self._counted = counted  # in the loop's running batch
        self._waiting = waiting  # a context in which ranks may wait for each other
        self._results = trainer.fit_loop.epoch_loop._results
        self._has_several_passes = False  # whether the running window has several passes
        self._exchanged: list[Tensor] = []  # over ranks, in the running window
        self._next = 0  # the one of these that is due next
        self._settings: Settings = {}  # of the value that is being logged
        self._values: dict[str, dict[int, Logged]] = {}  # of the running window, by key and micro-batch
        self._copies: dict[int, Metric | None] = {}  # of metrics, by identity: they see the running window alone

    def begin_window(self) -> None:
        """Forget what passes have logged; if the window has several, merge what they will log.

        What was exchanged stays: a window that begins again reads it, until its last batch has ended.
        """
        self._next = 0
        self._values = {}
        for copy in self._copies.values():
            if copy is not None:
                copy.reset()
        self._has_several_passes = self._place.factor > 1 and not self._place.skips_backward

    def begin_merging(self) -> None:
        """Merge the values of the running window from here on, because it has several passes."""
        self._has_several_passes = True

    @property
    def _merges(self) -> bool:
        """Whether values of the running window are merged.

        On several ranks, those of a single pass are, too: a rank that repeats it must not exchange them again.
        """
        runs_on_ranks = self._trainer.world_size > 1 and not self._place.skips_backward
        return self._has_several_passes or runs_on_ranks

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which the values of windows are merged."""
        with ExitStack() as held:
            held.enter_context(shadowed(self._results, "log", self._log))
            held.enter_context(shadowed(self._results, "update_metrics", self._update))
            held.enter_context(shadowed(self._trainer._logger_connector, "on_batch_end", self._end_batch))
            for metric in self._trainer.lightning_module.modules():
                # A wrapper updates others, which a copy of it would share.
                if isinstance(metric, Metric) and not any(isinstance(part, Metric) for part in [*metric.modules()][1:]):
                    held.enter_context(_copied_updates(metric, self._copy_of))
            yield

    # --- what is logged ------------------------------------------------------------------------

    def _log(self, fx: str, name: str, value: Any, **settings: Any) -> None:
        self._settings = settings
        type(self._results).log(self._results, fx, name, value, **settings)

    def _update(self, key: str, value: Any, batch_size: int) -> None:
        """Let Lightning take a value, and show the window's."""
        results = self._results
        result = results[key]
        update = partial(type(results).update_metrics, results, key, value, batch_size)
        if not self._merges or not result.meta.on_step:
            update()
            return
        shown = result._forward_cache
        with replaced(result.meta.sync, should=False):
            update()
        own = result._forward_cache.detach() if result.is_tensor else value
        counted = self._counted()
        logged = self._values.setdefault(key, {})
        logged[self._place.ready] = Logged(own, self._settings, counted.samples, counted.items)
        if self._place.window_is_over:
            self._show(key)
        elif shown is not None:
            result._forward_cache = shown

    def _end_batch(self) -> None:
        """At a window's end, show values that its last micro-batch has not logged, before Lightning reads all."""
        if self._place.window_is_over and self._trainer.training:  # validation ends batches, too
            for key, logged in self._values.items():
                if self._place.ready not in logged:
                    self._show(key)
            self._exchanged = []
        connector = self._trainer._logger_connector
        type(connector).on_batch_end(connector)

    def _show(self, key: str) -> None:
        """Show the window's value of a name, over ranks if that was asked for."""
        result = self._results[key]
        if not result.is_tensor:
            result._forward_cache = result.value._forward_cache
            copy = self._copies.get(id(result.value))
            if copy is not None and copy.update_called:
                result._forward_cache = copy.compute()
            return
        logged = [*self._values[key].values()]
        used = [each for each in logged if each.samples] or logged  # without stand-ins
        value, _ = merged_entry(used)
        weight = float(sum(each.weight for each in used))
        result._forward_cache = self._over_ranks(value, weight, result.meta.sync)

    def _over_ranks(self, value: Tensor, weight: float, sync: Any) -> Tensor:
        """Exchange a value between ranks if that was asked for, unless it was exchanged before the window failed."""
        if not sync.should:
            return value
        if self._next == len(self._exchanged):
            with ranks.uncounted_collectives(), self._waiting():
                self._exchanged.append(_exchanged(value, weight, sync))
        self._next += 1
        return self._exchanged[self._next - 1]

    def _copy_of(self, metric: Metric) -> Metric | None:
        """Return the copy of a metric that sees the running window; ``None`` outside of it, as in trial passes."""
        computes_value = metric._enable_grad  # only within ``forward``, whichever of its two ways it takes
        if not self._has_several_passes or not computes_value or self._trainer._results is not self._results:
            return None
        if id(metric) not in self._copies:
            self._copies[id(metric)] = _empty_copy(metric)
        return self._copies[id(metric)]


def logging_redirected(results: Any, note: Callable[..., None]) -> AbstractContextManager[None]:
    """Return a context in which ``note(hook, name, value, settings)`` gets what is logged.

    Prediction has no ``results`` and logs nothing. Lightning has copied a tensor and cut its graph off.
    """
    if results is None:
        return nullcontext()
    return shadowed(results, "log", lambda fx, name, value, **more: note(fx, name, plain(value), more))


def plain(value: Any) -> Any:
    """Return a tensor without its graph; one of a user's class, which may do anything when merged, as a plain one."""
    if isinstance(value, Tensor) and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().as_subclass(Tensor)
    return value.detach() if isinstance(value, Tensor) else value


def _copied_updates(metric: Metric, copy_of: Callable[[Metric], Metric | None]) -> AbstractContextManager[None]:
    """Return a context in which a copy gets what ``forward`` gives a metric."""
    update = metric.update

    def update_both(*given: Any, **named: Any) -> None:
        update(*given, **named)
        copy = copy_of(metric)
        if copy is not None:
            copy.update(*given, **named)

    return shadowed(metric, "update", update_both)


def _empty_copy(metric: Metric) -> Metric | None:
    """Copy a metric without what it has collected, and without networks in it; ``None`` if it cannot be copied."""
    known: dict[int, Any] = {id(part): part for part in metric.children()}
    for value in metric_state(metric).values():
        if isinstance(value, Tensor):
            known[id(value)] = value.detach()
        elif isinstance(value, list):
            known[id(value)] = []
    try:
        copy = deepcopy(metric, known)
    except Exception:  # of whatever a metric of the user's own keeps
        return None
    copy._enable_grad = False
    copy.reset()
    return copy


def _exchanged(value: Tensor, weight: float, sync: Any) -> Tensor:
    """Exchange a value; a mean is weighted by what each rank has counted, if not all have counted as much."""
    if sync.op != "mean":
        return cast(Tensor, sync(value))
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    of_rank = torch.full_like(wide, weight)
    product = torch.zeros_like(wide)
    if weight:  # a mean over nothing is NaN, and 0 × NaN too
        product = wide * weight
    # Over ranks.
    mean_value, mean_product, mean_weight, mean_square = sync(torch.stack([wide, product, of_rank, of_rank.square()]))
    are_equal = mean_square == mean_weight.square()
    return torch.where(are_equal, mean_value, mean_product / mean_weight).to(value.dtype)


def merged_entry(logged: Sequence[Logged], largest: int = 0) -> tuple[Any, Settings]:
    """Merge what was logged in all passes: add up sums, average means by weight or by a counted ``batch_size``.

    ``largest``: samples of a full batch; the last one may be smaller. 0 if unknown.
    """
    values = [each.value for each in logged]
    weights, settings = _weights_of(logged, largest)
    if not all(isinstance(value, Tensor) for value in values):  # a metric has seen all passes
        return values[0], settings
    kind = settings.get("reduce_fx", "mean")
    reduce = _REDUCTIONS.get(str(getattr(kind, "__name__", kind)).lower())
    if reduce is None:
        return mean(values, weights), settings
    return reduce(torch.stack(values)), settings


def _weights_of(logged: Sequence[Logged], largest: int) -> tuple[Sequence[float], Settings]:
    """Return what passes weigh in means, and the settings by which the merged value is logged.

    - The settings are those of the first pass; their ``batch_size`` is the sum over passes if each has counted its own.
    - Passes weigh what they have counted, if that is not their samples; else the weights they were logged with.
    """
    samples = [each.samples for each in logged]
    given = [each.settings.get("batch_size") for each in logged]
    sizes = [None if size is None else int(size) for size in given]  # sets hold equal tensors apart
    settings = {**logged[0].settings}
    counts = [size for size in sizes if size is not None]
    units = logged[0].units or logged[0].samples
    if len(counts) == len(samples) and _are_counts(counts, samples, units, largest):
        settings["batch_size"] = sum(counts)
        if counts != samples:
            return counts, settings
    return [each.weight for each in logged], settings


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Average tensors of one element in at least single precision; leave out those of weight 0, means over nothing."""
    dtype = torch.result_type(values[0], 1.0)
    pairs = [pair for pair in zip(values, weights) if pair[1]] or [(values[-1], 1.0)]
    kept, shares = zip(*pairs)
    wide = torch.stack(kept).to(torch.promote_types(dtype, torch.float32))
    if len({*shares}) == 1:  # of equal weights; a single value stays what it is, to the bit
        return wide.mean(0).to(dtype)
    weighted = [value * weight for value, weight in zip(wide, shares)]
    return (torch.stack(weighted).sum(0) / float(sum(shares))).to(dtype)


def _are_counts(sizes: Sequence[int], samples: Sequence[int], units: int, largest: int) -> bool:
    """Return whether each ``batch_size`` seems to be counted in its pass, and not to be a constant as the loader's.

    - Sizes that differ from pass to pass, or that equal the passes' samples, are counted.
    - One size for passes of unlike samples is a constant, and so is one that equals the samples of all passes, or of
      the ``largest`` batch.
    - Another size for passes of equal samples may count tokens, as many in each sample: 24 in 8 samples, but not 25. Or
      it counts what several loaders give in each of so many ``units``.
    """
    if len({*sizes}) > 1 or [*sizes] == [*samples]:
        return True
    if len({*samples}) > 1 or samples[0] == 0:  # a rank without a sample runs a stand-in
        return False
    return sizes[0] % units == 0 and sizes[0] not in (sum(samples), largest)
