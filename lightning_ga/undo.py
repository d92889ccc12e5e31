"""What an attempt at a step changes before it fails, and how it is put back.

Kept before every attempt, so it has to cost next to nothing: random numbers, the states of metrics
and most buffers are small; of most gradients nothing is copied at all. A gradient that a failed
backward pass has touched holds that pass's whole contribution, as autograd adds to a parameter's
gradient once, when all of it is summed: so the next attempt leaves it alone (``GradientMarks``). The
first pass that goes through shows for which parameters that does not hold (``Accumulations``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torchmetrics import Metric

from lightning_ga.snapshot import RandomState

SMALL = 2**20  # bytes of a buffer that is copied before every attempt


class AttemptState:
    """Random numbers, buffers and metrics before an attempt.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: Module) -> None:
        self.buffers = BufferStash(module)
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._random: RandomState | None = None
        self._kept: list[dict[str, Any]] = []

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of the module."""
        return self._metrics

    def keep(self) -> None:
        """Remember everything as it is now."""
        self._random = RandomState()
        self.buffers.keep()
        self._kept = [metric_state(metric) for metric in self._metrics]

    def put_back(self) -> None:
        """Set everything back to what was kept."""
        assert self._random is not None, "nothing was kept"
        self._random.restore()
        self.buffers.put_back()
        for metric, state in zip(self._metrics, self._kept):
            set_metric_state(metric, state)


class BufferStash:
    """Copies of a module's buffers: small ones made before every attempt, large ones when they have changed.

    Small ones are copied beside themselves, in one call: BatchNorm changes its statistics without
    raising their version. Of large ones, such as masks, the version (``_version``) tells whether the
    last copy is old; the first copy lies on the host, so one that never changes takes no device memory.
    A step may also put new tensors in the place of its buffers: then the old ones come back.

    Args:
        module: The module whose buffers may change in a step.
    """

    def __init__(self, module: Module) -> None:
        self._owners = [part._buffers for part in module.modules()]
        self._kept: list[dict[str, Tensor | None]] = []
        self._small: list[Tensor] = []
        self._large: list[_Versioned] = []
        self._watch()

    def tensors(self) -> Iterator[Tensor]:
        """The copies that lie where the buffers do."""
        yield from self._copies
        yield from (large.copy for large in self._large)

    def keep(self) -> None:
        """Copy what may have changed since the last time."""
        if any(
            owner.keys() != kept.keys() or any(owner[name] is not kept[name] for name in kept)
            for owner, kept in zip(self._owners, self._kept)
        ):
            self._watch()
        _copy_all(self._copies, self._small)
        for large in self._large:
            large.keep()

    def put_back(self) -> None:
        """Write the copies back."""
        for owner, kept in zip(self._owners, self._kept):
            owner.clear()
            owner.update(kept)
        _copy_all(self._small, self._copies)
        for large in self._large:
            large.put_back()

    def _watch(self) -> None:
        """See which tensors are the buffers now."""
        self._kept = [dict(owner) for owner in self._owners]
        every = {id(b): b for kept in self._kept for b in kept.values() if b is not None and not b.is_meta}
        known = {id(large.buffer): large for large in self._large}
        self._small = [buffer for buffer in every.values() if buffer.numel() * buffer.element_size() <= SMALL]
        self._copies = [torch.empty_like(buffer) for buffer in self._small]
        small = {id(buffer) for buffer in self._small}
        self._large = [known.get(key) or _Versioned(buffer) for key, buffer in every.items() if key not in small]


class _Versioned:
    """A buffer and a copy of it, made anew when the buffer's version has risen."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.copy = buffer.detach().to("cpu", copy=True)
        self._version = buffer._version

    @torch.no_grad()
    def keep(self) -> None:
        if self.buffer._version != self._version:
            self.copy = self.buffer.detach().clone()
            self._version = self.buffer._version

    @torch.no_grad()
    def put_back(self) -> None:
        if self.buffer._version != self._version:
            self.buffer.copy_(self.copy)
            self._version = self.buffer._version


@torch.no_grad()
def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


class GradientMarks:
    """Which gradients an attempt has touched, told by their versions: nothing is copied but what is repeated.

    Args:
        parameters: Parameters that may have a gradient.
        repeated: Those that a backward pass adds to more than once; see ``Accumulations``.
    """

    def __init__(self, parameters: Iterable[Parameter], repeated: Iterable[Parameter] = ()) -> None:
        self._repeated = [(p, None if p.grad is None else p.grad.clone()) for p in repeated]
        apart = {id(parameter) for parameter, _ in self._repeated}
        self._parameters = [p for p in parameters if p.requires_grad and id(p) not in apart]
        self._marks = [_mark(parameter) for parameter in self._parameters]

    def put_back(self) -> list[Parameter]:
        """Undo what can be half done; parameters that have the whole contribution of the attempt's samples."""
        with torch.no_grad():
            for parameter, gradient in self._repeated:
                if gradient is None or parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)
        pairs = zip(self._parameters, self._marks)
        return [parameter for parameter, mark in pairs if _mark(parameter) != mark]


class Accumulations:
    """Counts how often a backward pass adds to each gradient.

    Once, as a rule, however often a parameter is used. More than once where backward passes run
    within one another: ``torch.utils.checkpoint`` with ``use_reentrant=True`` does that, and weights
    that several checkpointed parts share are added to by each.

    Args:
        parameters: Parameters that may have a gradient.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._counts: Counter[int] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within, backward passes are watched."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def repeated(self) -> list[Parameter]:
        """Parameters that were added to more than once."""
        return [parameter for parameter in self._parameters if self._counts[id(parameter)] > 1]

    def _count(self, parameter: Tensor) -> None:
        self._counts[id(parameter)] += 1


@contextmanager
def left_alone(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Within, backward passes add nothing to the gradients of these parameters."""
    hooks = [parameter.register_hook(torch.zeros_like) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def metric_state(metric: Metric) -> dict[str, Any]:
    """Copies of the attributes of a metric that an update may change."""
    states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    return {**states, **{name: vars(metric)[name] for name in _COUNTERS if name in vars(metric)}}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give a metric copies of what ``metric_state`` took: updates change states in place."""
    for name, value in state.items():
        setattr(metric, name, value if name in _COUNTERS else _copied(value))


def _copied(state: Any) -> Any:
    """A tensor of one state, or the list that updates append to; what is in the list never changes."""
    return list(state) if isinstance(state, list) else state.clone()


# What torchmetrics 1.9 keeps of a metric besides its states (``metric.py``, ``reset`` and ``forward``).
_COUNTERS = ("_update_count", "_forward_cache", "_computed", "_cache", "_is_synced")


def _mark(parameter: Parameter) -> tuple[int, int]:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)
