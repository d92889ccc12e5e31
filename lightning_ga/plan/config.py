"""The arguments of ``AutoAccumulate`` as records, checked before anything runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, get_args

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import ceil_div, require_count, whole_multiples
from lightning_ga.plan.batch_schedule import (
    NOT_GIVEN,
    PiecewiseSchedule,
    Schedule,
    as_schedule,
    require_arguments,
)
from lightning_ga.plan.units import LEAST_BYTES, parse_budget

Budget = int | float | str | None
ScaleLr = Literal["none", "linear", "sqrt"]
Normalize = Literal["samples"] | Callable[[Any], Any] | None

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "objective": ("memory", "throughput"),
    "micro_batching": ("loader", "step"),
    "shares": ("equal", "memory", "speed"),
    "on_oom": ("split", "skip", "raise"),
    "batch_norm": ("warn", "ignore"),
    "verify": (True, False),
    "cache": (True, False),
    "scale_lr": get_args(ScaleLr),
}
"""Arguments of ``AutoAccumulate`` that are one of some values."""

_APART: Mapping[str, tuple[str, ...]] = {
    "size_of": (
        "whole",
        "shares",
        "objective",
        "accumulate",
        "micro_batching",
        "micro_batch_multiple",
        "effective_batch_size",
    ),
    "whole": ("shares", "objective", "accumulate", "micro_batch_multiple"),  # a window is one batch
    "shares": ("objective", "accumulate", "micro_batching", "effective_batch_size"),
}
"""Arguments, and those that they do not go together with, if they have the values in ``_refuse_together``."""


@dataclass(frozen=True, slots=True)
class Request:
    """The sizes that the user asked for, as functions of the epoch if they may change in training."""

    schedule: Schedule  # of factors or effective batches; ``None`` in epochs for which it keeps the recipe's
    is_factor: bool  # whether the schedule is ``accumulate=``
    micro_batch: int | None  # ``None`` to probe for it
    most: int | None  # upper bound of the micro-batch
    multiple: int = 1  # of which micro-batches are multiples

    def asked_effective(self, epoch: int) -> int | None:
        """Return the effective batch that was asked for in an epoch; ``None`` if none was."""
        return None if self.is_factor else self.schedule(epoch)

    def factor(self, epoch: int) -> int | None:
        """Return the factor that was asked for in an epoch; ``None`` if none was."""
        return self.schedule(epoch) if self.is_factor else None

    def effective_batch(self, epoch: int, micro_batch: int, world_size: int) -> int | None:
        """Return the effective batch size of an epoch; ``None`` keeps the recipe's windows."""
        count = self.schedule(epoch)
        if self.is_factor and count is not None:
            count *= micro_batch * world_size
        return count

    @property
    def counts_samples(self) -> bool:
        """Whether the windows of some epoch depend on the number of samples of a batch."""
        return self.is_by_samples or not (self.is_factor or self.schedule == NOT_GIVEN)

    @property
    def by_window(self) -> PiecewiseSchedule | None:
        """The schedule if it may change the windows of an epoch; ``None`` if all are as its epoch says."""
        if isinstance(self.schedule, PiecewiseSchedule) and self.schedule.by_window:
            return self.schedule
        return None

    @property
    def is_by_samples(self) -> bool:
        """Whether windows change with the samples that training has seen."""
        return self.by_window is not None and self.by_window.unit == "samples"

    def count_at(self, epoch: int, *, step: int, samples: int) -> int | None:
        """Return the count of the schedule for a window that begins after so many steps and samples."""
        return self.schedule(epoch) if self.by_window is None else self.by_window.at(step, samples)

    @property
    def varies(self) -> bool:
        """Whether windows may change in training."""
        if not isinstance(self.schedule, PiecewiseSchedule):
            return True
        return self.by_window is not None or self.schedule.starts not in ((), (0,))

    def growth(self, micro_batch: int, world_size: int, steps: int, samples: int) -> PiecewiseSchedule | None:
        """Return the effective batches of an epoch that begins after so many steps and samples of all ranks."""
        if self.by_window is None:
            return None
        times = micro_batch * world_size if self.is_factor else 1
        return self.by_window.later(steps, samples, times=times)

    def micro_batch_in_place_of(self, found: int) -> int:
        """Return the micro-batch that the user gives, else the one that was found; at most ``max_micro_batch_size``."""
        wanted = self.micro_batch or found
        return min(wanted, self.most or wanted)

    def useful_limit(self, epochs: range, *, recipe: int, total: int | None, world_size: int) -> int:
        """Return the largest micro-batch that any of these epochs can use, in samples.

        With a fixed factor it leaves one full window per epoch; otherwise it is a rank's share of the
        largest effective batch.
        """
        factor = max(self.factor(epoch) or 0 for epoch in epochs)
        if factor:
            share = recipe
            if total is not None:
                share = max(1, total // (factor * world_size))
            return self.micro_batch_in_place_of(whole_multiples(share, self.multiple))
        largest = max(self.asked_effective(epoch) or recipe for epoch in epochs)
        if total is not None:
            largest = min(largest, max(1, total))
        return self.micro_batch_in_place_of(ceil_div(largest, world_size))


def rate_ratio(scale_lr: ScaleLr, batch: int, recipe: int) -> float:
    """Return by what the learning rate is multiplied for another batch than the recipe's.

    Linear (Goyal et al., arXiv 1706.02677) or by the root (Malladi et al., arXiv 2205.10287).
    """
    ratio = batch / recipe
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scale_lr]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of ``AutoAccumulate`` other than sizes; ``budget`` is its ``memory_budget``."""

    budget: Budget = None
    normalize: Normalize = "samples"
    batch_norm: str = "warn"
    verify: bool = True
    objective: str = "memory"
    cache: bool = True
    on_oom: str = "split"
    micro_batching: str = "loader"
    shares: str = "equal"
    whole: tuple[str, ...] = ()
    scale_lr: ScaleLr = "none"
    size_of: Callable[[Any, Any], int] | str | None = None
    checkpoint: tuple[str, ...] | Literal["auto"] = ()  # names, or none


def read_arguments(given: Mapping[str, Any]) -> tuple[Request, Options]:
    """Check the arguments of ``AutoAccumulate``, by name, and turn them into records."""
    for name, choices in CHOICES.items():
        require_choice(name, given[name], choices)
    normalize = given["normalize"]
    if callable(normalize):
        require_arguments("normalize", normalize, "batch", "len(batch)")
    elif normalize is not None and not (isinstance(normalize, str) and normalize == "samples"):
        raise UserError(f'{normalize=} must be "samples", None or a callable that counts the items of a batch.')
    parse_budget(given["memory_budget"], 1 << 40, least=LEAST_BYTES)  # refused here if no device can have it
    request = read_request(given)
    whole = _read_names("whole", given["whole"])
    size_of = given["size_of"]
    if callable(size_of):
        require_arguments("size_of", size_of, "dataset, index", "len(dataset[index])")
    elif size_of is not None and (not isinstance(size_of, str) or not size_of):
        raise UserError(f'{size_of=} must be a callable (dataset, index) -> int, the name of a column, or "auto".')
    checkpoint = given["checkpoint"]
    if checkpoint != "auto":
        checkpoint = _read_names("checkpoint", checkpoint or ())
    if whole:
        normalize = None  # a window is one batch, with one loss
    options = Options(
        **{name: given[name] for name in CHOICES},
        budget=given["memory_budget"],
        normalize=normalize,
        whole=whole,
        size_of=size_of,
        checkpoint=checkpoint,
    )
    _refuse_together(options, request)
    return request, options


def read_request(given: Mapping[str, Any]) -> Request:
    """Check the arguments for sizes, and turn them into a ``Request``."""
    effective_batch_size = given["effective_batch_size"]
    accumulate = given["accumulate"]
    micro_batch_size = given["micro_batch_size"]
    most = given["max_micro_batch_size"]
    if isinstance(micro_batch_size, str) and micro_batch_size != "auto":
        raise UserError(f'{micro_batch_size=} must be a whole number of at least 1, or "auto".')
    if effective_batch_size is not None and accumulate is not None:
        raise UserError(
            f"{effective_batch_size=} and {accumulate=} exclude each other: the first lets the factor follow, the "
            "second fixes it. Give one."
        )
    if isinstance(accumulate, Mapping) and accumulate:
        accumulate = {0: 1, **accumulate}  # before the first epoch of a mapping, as in Lightning's scheduler
    if accumulate is not None:
        schedule = as_schedule(accumulate, name="accumulate")
    else:
        schedule = as_schedule(effective_batch_size, name="effective_batch_size")
    micro_batch = None
    if not isinstance(micro_batch_size, str):
        micro_batch = require_count("micro_batch_size", micro_batch_size)
    if most is not None:
        most = require_count("max_micro_batch_size", most)
    multiple = require_count("micro_batch_multiple", given["micro_batch_multiple"])
    if micro_batch is not None and micro_batch % multiple:
        raise UserError(
            f"{micro_batch_size=} is no multiple of micro_batch_multiple={multiple}: give "
            f"{ceil_div(micro_batch, multiple) * multiple}, or leave one of them out."
        )
    if most is not None and most < multiple:
        raise UserError(
            f"max_micro_batch_size={most} is below micro_batch_multiple={multiple}, so that no micro-batch is a "
            f"multiple: give at least {multiple}."
        )
    return Request(
        schedule=schedule,
        is_factor=accumulate is not None,
        micro_batch=micro_batch,
        most=most,
        multiple=multiple,
    )


def require_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if getattr(value, "ndim", 0) or value not in choices:  # arrays have no answer
        raise UserError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _read_names(argument: str, given: Any) -> tuple[str, ...]:
    """Check the names of submodules; a string is one name."""
    if isinstance(given, str) and given:
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(name, str) and name for name in given):
        raise UserError(f'{argument}={given!r} must be a tuple of names of submodules, such as ("encoder",).')
    return tuple(given)


def _refuse_together(options: Options, request: Request) -> None:
    """Refuse arguments that do not go together."""
    if options.on_oom == "skip" and options.normalize is None:
        what = f"whole={options.whole!r}" if options.whole else "normalize=None"
        raise UserError(
            f"on_oom='skip' leaves samples out of a mean over samples, and {what} makes no such mean: leave one of "
            "them out."
        )
    is_given = {
        "size_of=": options.size_of is not None,
        f"whole={options.whole!r}": options.whole != (),
        f"shares={options.shares!r}": options.shares != "equal",
        "objective='throughput'": options.objective == "throughput",
        "accumulate=": request.is_factor,
        "micro_batching='step'": options.micro_batching == "step",
        f"micro_batch_multiple={request.multiple}": request.multiple > 1,
        f"effective_batch_size={request.by_window!r}": request.by_window is not None,
    }
    for first, second in combinations(filter(is_given.get, is_given), 2):
        if second.partition("=")[0] in _APART.get(first.partition("=")[0], ()):
            raise UserError(f"{first} and {second} do not go together: leave one of them out.")
