"""The arguments of ``AutoAccumulate`` as records, checked before anything runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import ceil_div, require_count, whole_multiples
from lightning_ga.plan.batch_schedule import Growth, PiecewiseSchedule, Schedule, as_schedule, require_arguments
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


@dataclass(frozen=True, slots=True)
class Request:
    """The sizes that the user asked for, as functions of the epoch if they may change in training."""

    effective: Schedule  # ``None`` keeps the recipe's
    factor: Schedule  # ``None`` if the effective batch decides
    micro_batch: int | None  # ``None`` to probe for it
    most: int | None  # upper bound of the micro-batch
    multiple: int = 1  # of which micro-batches are multiples

    def effective_batch(self, epoch: int, micro_batch: int, world_size: int) -> int | None:
        """Return the effective batch size of an epoch; ``None`` keeps the recipe's windows."""
        factor = self.factor(epoch)
        if factor is None:
            return self.effective(epoch)
        return factor * micro_batch * world_size

    @property
    def counts_samples(self) -> bool:
        """Whether the windows of some epoch depend on the number of samples of a batch."""
        return self.is_by_samples or self.effective(0) is not None or self.effective(10**9) is not None

    @property
    def by_window(self) -> PiecewiseSchedule | None:
        """The schedule that may change the windows of an epoch; ``None`` if all are as its epoch says."""
        schedules = (each for each in (self.effective, self.factor) if isinstance(each, PiecewiseSchedule))
        return next((each for each in schedules if each.by_window), None)

    @property
    def is_by_window(self) -> bool:
        """Whether windows may change within an epoch."""
        return self.by_window is not None

    @property
    def is_by_samples(self) -> bool:
        """Whether windows change with the samples that training has seen."""
        return self.by_window is not None and self.by_window.unit == "samples"

    def effective_at(self, epoch: int, *, step: int, samples: int) -> int | None:
        """Return the effective batch of a window that begins after so many steps and samples; ``None`` if not given."""
        schedule = self.by_window
        return schedule.at(step, samples) if schedule is self.effective else self.effective(epoch)

    def factor_at(self, epoch: int, *, step: int, samples: int) -> int | None:
        """Return the factor of a window that begins after so many steps and samples; ``None`` if not given."""
        schedule = self.by_window
        return schedule.at(step, samples) if schedule is self.factor else self.factor(epoch)

    @property
    def varies(self) -> bool:
        """Whether windows may change in training."""
        schedules = (self.effective, self.factor)
        starts = [each.starts if isinstance(each, PiecewiseSchedule) else None for each in schedules]
        return self.is_by_window or any(each not in ((), (0,)) for each in starts)

    def growth(self, micro_batch: int, world_size: int, steps: int, samples: int) -> Growth | None:
        """Return the effective batches of an epoch that begins after so many steps and samples of all ranks."""
        schedule = self.by_window
        if schedule is None:
            return None
        times = micro_batch * world_size if schedule is self.factor else 1
        return Growth(schedule, times, steps, samples)

    def capped(self, micro_batch: int) -> int:
        """Return the micro-batch that the user's arguments allow instead of this one."""
        wanted = micro_batch if self.micro_batch is None else self.micro_batch
        return wanted if self.most is None else min(wanted, self.most)

    def in_multiples(self, micro_batch: int) -> int:
        """Return the largest micro-batch that the user's arguments allow, of at most so many samples."""
        return whole_multiples(self.capped(micro_batch), self.multiple)

    def useful_limit(self, epochs: range, *, recipe: int, total: int | None, world_size: int) -> int:
        """Return the largest micro-batch that any of these epochs can use, in samples.

        With a fixed factor it leaves one full window per epoch; otherwise it is a rank's share of the
        largest effective batch.
        """
        factor = max(self.factor(epoch) or 0 for epoch in epochs)
        largest = max(self.effective(epoch) or recipe for epoch in epochs)
        share = ceil_div(largest, world_size)
        if factor:
            share = recipe if total is None else max(1, total // (factor * world_size))
            share = whole_multiples(share, self.multiple)
        elif total is not None:
            share = min(share, max(1, ceil_div(total, world_size)))
        return self.capped(share)


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
    normalize = given["normalize"]
    budget = given["memory_budget"]
    _refuse_removed(given)
    require_choice(**{name: (given[name], choices) for name, choices in CHOICES.items()})
    if callable(normalize):
        require_arguments("normalize", normalize, "batch", "len(batch)")
    elif normalize is not None and not (isinstance(normalize, str) and normalize == "samples"):
        raise UserError(f'{normalize=} must be "samples", None or a callable that counts the items of a batch.')
    parse_budget(budget, 1 << 40, least=LEAST_BYTES)  # refused here if no device can have it
    request = read_request(given)
    whole = _read_names("whole", given["whole"])
    size_of = given["size_of"]
    checkpoint = given["checkpoint"]
    if checkpoint != "auto":
        checkpoint = _read_names("checkpoint", () if checkpoint is None else checkpoint)
    if callable(size_of):
        require_arguments("size_of", size_of, "dataset, index", "len(dataset[index])")
    elif size_of is not None and (not isinstance(size_of, str) or not size_of):
        raise UserError(f'{size_of=} must be a callable (dataset, index) -> int, the name of a column, or "auto".')
    options = Options(
        **{name: given[name] for name in CHOICES},
        budget=budget,
        normalize=None if whole and normalize == "samples" else normalize,  # all ranks have the same loss
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
    # Factors are 1 before the first epoch of a mapping, as in Lightning's scheduler.
    factors = accumulate
    if isinstance(accumulate, Mapping) and accumulate:
        factors = {0: 1, **accumulate}
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
        effective=as_schedule(effective_batch_size, name="effective_batch_size"),
        factor=as_schedule(factors, name="accumulate"),
        micro_batch=micro_batch,
        most=most,
        multiple=multiple,
    )


def require_choice(**given: tuple[Any, tuple[Any, ...]]) -> None:
    """Refuse a value that is not among the choices."""
    for name, (value, choices) in given.items():
        if getattr(value, "ndim", 0) or value not in choices:  # arrays have no answer
            raise UserError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _refuse_removed(given: Mapping[str, Any]) -> None:
    """Refuse what earlier versions had, and name what to use instead."""
    effective = given["effective_batch_size"]
    if isinstance(effective, str):
        raise UserError(
            f"effective_batch_size={effective!r} is no number of samples: for windows by tokens, give the DataLoader a "
            "batch sampler that makes batches of so many tokens."
        )
    if isinstance(given["whole"], str) and given["whole"] == "auto":
        raise UserError('whole="auto" was removed: name the submodules that run in chunks, as in whole=("encoder",).')
    if given.get("scale_beta2"):
        raise UserError("scale_beta2= was removed: set the optimizer's betas for the effective batch yourself.")


def _read_names(argument: str, given: Any) -> tuple[str, ...]:
    """Check the names of submodules; a string is one name."""
    names = (given,) if isinstance(given, str) and given else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f'{argument}={given!r} must be a tuple of names of submodules, such as ("encoder",).')
    return tuple(names)


def _refuse_together(options: Options, request: Request) -> None:
    """Refuse arguments that do not go together."""
    if options.whole and request.factor(0) is not None:
        raise UserError(
            f"whole={options.whole!r} makes a window one batch, so its factor is 1, and accumulate="
            f"{request.factor(0)} asks for another: give effective_batch_size=… instead."
        )
    if options.on_oom == "skip" and options.normalize is None:
        what = f"whole={options.whole!r}" if options.whole else "normalize=None"
        raise UserError(
            f"on_oom='skip' leaves samples out of a mean over samples, and {what} makes no such mean: leave one of "
            "them out."
        )
    others = {
        "objective='throughput'": options.objective == "throughput",
        "accumulate=": request.factor(0) is not None,
        "micro_batching='step'": options.micro_batching == "step",
        f"whole={options.whole!r}": options.whole,
        f"micro_batch_multiple={request.multiple}": request.multiple > 1,
        f"effective_batch_size={request.by_window!r}": request.is_by_window,
    }
    others["size_of="] = options.size_of is not None
    pairs = [("size_of=", name) for name in others if name != "size_of=" and options.size_of is not None]
    if options.whole:
        chunked = f"whole={options.whole!r}"
        pairs += [(chunked, "objective='throughput'"), (chunked, f"micro_batch_multiple={request.multiple}")]
    if options.shares != "equal":
        apart = f"micro_batch_multiple={request.multiple}"
        pairs += [(f"shares={options.shares!r}", name) for name in others if name != apart]
    for first, second in pairs:
        if others[second]:
            raise UserError(f"{first} and {second} do not go together: leave one of them out.")
