"""The arguments of ``AutoAccumulate`` as records, checked before anything runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count
from lightning_ga.plan.schedule import Growth, PiecewiseSchedule, Schedule, ScheduleLike, as_schedule, require_arguments
from lightning_ga.plan.units import LEAST_BYTES, read_tokens, require_bytes

Budget = int | float | str | None
ScaleLr = Literal["none", "linear", "sqrt"]
Normalize = Literal["samples"] | Callable[[Any], Any] | None
Whole = tuple[str, ...] | Literal["auto"]

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "objective": ("memory", "throughput"),
    "micro_batching": ("loader", "step"),
    "on_oom": ("split", "raise"),
    "batch_norm": ("warn", "ignore"),
    "verify": (True, False),
    "cache": (True, False),
    "scale_lr": get_args(ScaleLr),
    "scale_beta2": (True, False),
}
"""Arguments of ``AutoAccumulate`` that are one of some values."""
_RATES = ("scale_lr", "scale_beta2")


@dataclass(frozen=True, slots=True)
class Request:
    """The sizes that the user asked for, as functions of the epoch where they may change over training."""

    effective: Schedule  # ``None`` keeps the recipe's
    factor: Schedule  # ``None`` where the effective batch decides
    micro_batch: int | None  # ``None`` to probe for it
    most: int | None  # upper bound of the micro-batch

    def effective_batch(self, epoch: int, micro_batch: int, world_size: int) -> int | None:
        """Return the effective batch size of an epoch; ``None`` keeps the recipe's windows."""
        factor = self.factor(epoch)
        return self.effective(epoch) if factor is None else factor * micro_batch * world_size

    @property
    def by_window(self) -> PiecewiseSchedule | None:
        """The schedule that may change the windows of an epoch; ``None`` if all are as its epoch says."""
        schedules = (each for each in (self.effective, self.factor) if isinstance(each, PiecewiseSchedule))
        return next((each for each in schedules if each.by_window), None)

    @property
    def varies(self) -> bool:
        """Whether windows may be others later, from an epoch on or within one."""
        schedules = self.effective, self.factor
        constant = (each for each in schedules if isinstance(each, PiecewiseSchedule) and each.starts in ((), (0,)))
        return self.by_window is not None or len([*constant]) < len(schedules)

    def growth(self, micro_batch: int, world_size: int, steps: int, samples: int, windows_done: int) -> Growth | None:
        """Return the effective batches of an epoch that begins after so many steps and samples of all ranks."""
        schedule = self.by_window
        times = micro_batch * world_size if schedule is self.factor else 1
        return None if schedule is None else Growth(schedule, times, steps, samples, windows_done)

    def capped(self, micro_batch: int) -> int:
        """Return the micro-batch that the user's arguments allow instead of this one."""
        wanted = micro_batch if self.micro_batch is None else self.micro_batch
        return wanted if self.most is None else min(wanted, self.most)

    def useful_limit(self, epochs: range, *, recipe: int, total: int | None, world_size: int) -> int:
        """Return the largest micro-batch that any of these epochs can use, in samples.

        With a fixed factor it leaves one full window per epoch; otherwise it is a rank's share of the
        largest effective batch.
        """
        factor = max(self.factor(epoch) or 0 for epoch in epochs)
        share = -(-max(self.effective(epoch) or recipe for epoch in epochs) // world_size)
        if factor:
            share = recipe if total is None else max(1, total // (factor * world_size))
        elif total is not None:
            share = min(share, max(1, -(-total // world_size)))
        return self.capped(share)


@dataclass(frozen=True, slots=True)
class RateRule:
    """How another batch than the recipe's changes learning rate and Adam's β₂.

    Linear (Goyal et al., arXiv 1706.02677) or by the root (Malladi et al., arXiv 2205.10287); with ``scale_beta2`` the
    half-life stays the same in samples (Marek et al., arXiv 2507.07101).
    """

    scale_lr: ScaleLr = "none"
    scale_beta2: bool = False

    def scale(self, group: dict[str, Any], lr: Any, batch: int, recipe: int) -> None:
        """Set a parameter group's values, of which the learning rate is given."""
        ratio = batch / recipe
        group["lr"] = lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.scale_lr]
        if self.scale_beta2:
            group["betas"] = (group["betas"][0], group["betas"][1] ** ratio)


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
    whole: Whole = ()
    rates: RateRule = field(default_factory=RateRule)
    size_of: Callable[[Any, Any], int] | str | None = None
    tokens: int | None = None  # most of a window, if these decide where it ends


def read_arguments(given: Mapping[str, Any]) -> tuple[Request, Options]:
    """Check the arguments of ``AutoAccumulate``, by name, and turn them into records."""
    effective, normalize, budget = given["effective_batch_size"], given["normalize"], given["memory_budget"]
    _refuse_rescaling(given["batch_norm"])
    require_choice(**{name: (given[name], choices) for name, choices in CHOICES.items()})
    if callable(normalize):
        require_arguments("normalize", normalize, "batch", "len(batch)")
    elif normalize is not None and not (isinstance(normalize, str) and normalize == "samples"):
        raise UserError(f'{normalize=} must be "samples", None or a callable that counts the items of a batch.')
    if budget is not None:  # refused here if it is one of no device
        require_bytes("memory_budget", budget, 1 << 40, least=LEAST_BYTES)
    tokens = read_tokens("effective_batch_size", effective) if isinstance(effective, str) else None
    sizes = (given[name] for name in ("accumulate", "micro_batch_size", "max_micro_batch_size"))
    request = read_request(effective if tokens is None else None, *sizes)
    rates = RateRule(**{name: given[name] for name in _RATES})
    scales_rates(request, rates)
    whole, size_of = _read_whole(given["whole"], request), given["size_of"]
    if size_of is not None or tokens is not None:
        _check_size_of(given, request, whole)
    options = Options(
        **{name: given[name] for name in CHOICES if name not in _RATES},
        budget=budget,
        normalize=None if whole and normalize == "samples" else normalize,  # all ranks have the same loss
        whole=whole,
        rates=rates,
        size_of="auto" if tokens is not None and size_of is None else size_of,
        tokens=tokens,
    )
    return request, options


def read_request(
    effective_batch_size: ScheduleLike | None,
    accumulate: ScheduleLike | None,
    micro_batch_size: int | Literal["auto"],
    max_micro_batch_size: int | None,
) -> Request:
    """Check the arguments for sizes, and turn them into a ``Request``."""
    if effective_batch_size is not None and accumulate is not None:
        raise UserError(
            f"{effective_batch_size=} and {accumulate=} exclude each other: the first lets the factor follow, the "
            "second fixes it. Give one."
        )
    return Request(
        effective=as_schedule(effective_batch_size, name="effective_batch_size"),
        factor=_factors(accumulate),
        micro_batch=_micro_batch(micro_batch_size),
        most=None if max_micro_batch_size is None else require_count("max_micro_batch_size", max_micro_batch_size),
    )


def _read_whole(whole: Any, request: Request) -> Whole:
    """Check the names of submodules that run over whole windows; a string is one name, or ``"auto"``."""
    if whole == "auto":
        names: Whole = "auto"
    elif isinstance(whole, str):
        names = (whole,)
    elif isinstance(whole, Sequence) and all(isinstance(name, str) and name for name in whole):
        names = tuple(whole)
    else:
        raise UserError(f'{whole=} must be a tuple of names of submodules, such as ("encoder",), or "auto".')
    if names and request.factor(0) is not None:
        raise UserError(
            f"{whole=} makes a window one batch, so its factor is 1, and accumulate={request.factor(0)} asks for "
            "another: give effective_batch_size=… instead."
        )
    return names


def scales_rates(request: Request, rule: RateRule) -> str:
    """Return the argument that scales learning rates; empty if none does. Refuse two."""
    schedule = request.by_window
    names = [repr(schedule)] if schedule is not None and schedule.rates else []
    names += [f"scale_lr={rule.scale_lr!r}"] if rule.scale_lr != "none" else []
    if len(names) == 2:
        raise UserError(
            f"{names[0]} divides the learning rate, and {names[1]} multiplies it: leave one of the two out."
        )
    return " and ".join([*names, *(["scale_beta2=True"] if rule.scale_beta2 else [])])


def _refuse_rescaling(batch_norm: str) -> None:
    """Refuse a choice that earlier versions had, and say what to do instead."""
    if isinstance(batch_norm, str) and batch_norm == "rescale":
        raise UserError(
            'batch_norm="rescale" was removed because it gained nothing: use batch_norm="ignore" with '
            "torch.optim.swa_utils.update_bn after training, or larger micro-batches, or GroupNorm "
            "(lightning_ga.models.to_group_norm)."
        )


def _check_size_of(given: Mapping[str, Any], request: Request, whole: Whole) -> None:
    """Refuse a ``size_of`` that is no callable or name, and others that it, or windows by tokens, do not go with."""
    size_of, effective = given["size_of"], given["effective_batch_size"]
    if callable(size_of):
        require_arguments("size_of", size_of, "dataset, index", "len(dataset[index])")
    elif size_of is not None and (not isinstance(size_of, str) or not size_of):
        raise UserError(f'{size_of=} must be a callable (dataset, index) -> int, the name of a column, or "auto".')
    by_tokens = isinstance(effective, str)
    by_index = by_tokens or callable(size_of)
    others = {
        "accumulate": given["accumulate"],
        "micro_batching": "step" if given["micro_batching"] == "step" and by_index else None,
        "whole": whole,
        "effective_batch_size": request.by_window and effective,
        "scale_lr": given["scale_lr"] if by_tokens and given["scale_lr"] != "none" else None,
        "scale_beta2": by_tokens and given["scale_beta2"],
    }
    first = f"effective_batch_size={effective!r}" if by_tokens else "size_of="
    for name, value in others.items():
        if value:
            raise UserError(f"{first} and {name}={value!r} do not go together: leave one of them out.")


def require_choice(**given: tuple[Any, tuple[Any, ...]]) -> None:
    """Refuse a value that is none of the choices."""
    for name, (value, choices) in given.items():
        if getattr(value, "ndim", 0) or value not in choices:  # arrays have no answer
            raise UserError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _micro_batch(value: Any) -> int | None:
    if isinstance(value, str):
        if value == "auto":
            return None
        raise UserError(f'micro_batch_size={value!r} must be a whole number of at least 1, or "auto".')
    return require_count("micro_batch_size", value)


def _factors(accumulate: ScheduleLike | None) -> Schedule:
    """Return a schedule of factors, 1 before the first epoch of a mapping, as in Lightning's scheduler."""
    from_one = {0: 1, **accumulate} if isinstance(accumulate, Mapping) and accumulate else accumulate
    return as_schedule(from_one, name="accumulate")
