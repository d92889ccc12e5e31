"""Record in which phase the storages of a step are made, and sum up what holds the memory at its peak.

A ``MemoryTrace`` says which storages are alive when most bytes are, and ``StepOrigins`` where each was made. A storage
that is made in the forward pass and released in the backward pass is an activation. The parts sum to the peak.

Tested in tests/integration/test_peak_holders.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.live_tensors import HeldStorage, LiveTensorMeter, Recording, addresses
from lightning_ga.memory.trace import MemoryTrace, bytes_alive, rounded_up
from lightning_ga.plan import records as holder
from lightning_ga.plan.records import Attribution

Owned = Callable[[], Mapping[str, Iterable[Tensor]]]  # a method of a training: tensors of its state, by what they are
_ADD = torch.ops.aten.add.Tensor
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy", "binary_cross_entropy_with_logits")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a storage was made, and what it is, if that is known."""

    phase: str  # "forward", "backward" or "update"
    operation: str
    kind: str = ""  # as in ``plan.records``


@dataclass(frozen=True, slots=True)
class StepOrigins:
    """Where the storages of one recorded step come from."""

    made: Mapping[int, Origin]  # by the number in the trace; those alive before the step are missing
    resident: Mapping[str, int] = field(default_factory=dict)  # bytes of storage 0, by what is known of them
    complete: bool = True  # whether the step ran to its end


def attribute(trace: MemoryTrace, origins: StepOrigins, *, rounding: int = 1, peak: int = 0) -> Attribution:
    """Say what holds the memory at the peak of a step; ``peak`` is that of an allocator, which may be higher."""
    totals = bytes_alive(trace.sizes, trace.events, rounding)
    seen = max(totals)
    begun = trace.events[: totals.index(seen) + 1]
    past = {*begun}
    alive = {event for event in past if event > 0 and ~event not in past}
    last = _last_phases(trace, origins)
    held = Counter({holder.UNNAMED: max(0, peak - seen)})
    for number in alive:
        held[_part(origins.made.get(number), last[number])] += rounded_up(trace.sizes[number], rounding)
    before = rounded_up(trace.sizes[0], rounding)
    for name, size in origins.resident.items():
        held[name] += min(size, before)
        before -= min(size, before)
    held[holder.BEFORE] += before
    at = Origin("forward", "")
    for event in begun:
        at = origins.made.get(event, at)
    parts = tuple((name, size) for name, size in held.most_common() if size)
    return Attribution(trace.samples, max(seen, peak), at.phase, at.operation, parts)


def _last_phases(trace: MemoryTrace, origins: StepOrigins) -> list[str]:
    """Return the phase in which each storage was released; empty if it was not.

    If a step did not run to its end, storages from before the backward pass are treated as used in it.
    """
    phase = "forward"
    last = ["" if origins.complete else "backward"] * len(trace.sizes)
    for event in trace.events:
        if event in origins.made:
            phase = origins.made[event].phase
        if event < 0:
            last[~event] = phase
    return last


def _part(origin: Origin | None, released_in: str) -> str:
    """Name what a storage is: state, an activation, a temporary, or something that was kept."""
    if origin is None:
        return holder.BEFORE
    if origin.kind and (released_in or origin.kind != holder.LOGITS):
        return origin.kind
    if not released_in:
        return holder.KEPT
    if origin.phase == "update":
        return holder.UPDATE
    if origin.phase == "backward" and released_in == "update":
        return holder.GRADIENTS
    return holder.TEMPORARIES if origin.phase == released_in else holder.ACTIVATIONS


class OriginMeter(LiveTensorMeter):  # type: ignore[no-untyped-call]
    """Meters live tensors of a training, and records where they are made, and by which blocks of an allocator."""

    def __init__(self, owned: Owned, allocator: AllocatorMeter | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        # A meter lives until the garbage collector comes, because storages call it as they die; the training need not.
        self._owned_tensors = WeakMethod(owned)
        self._allocator = allocator
        self._blocks_before = 0
        self._origins: dict[int, Origin] = {}
        self._sums: list[tuple[int, int]] = []
        self._addresses: dict[int, tuple[int, int]] = {}  # by storage, with how many blocks were handed out
        self._kinds: dict[int, str] = {}  # of storages that were there before, by their addresses
        self._operation: Any = None
        self._was_backward = False

    def start(self, *, record: bool = False, budget: int | None = None) -> None:
        """Begin a step: the peak starts at what is alive, and what is alive is known by its owners."""
        super().start(record=record, budget=budget)
        self._origins = {}
        self._sums = []
        self._addresses = {}
        self._was_backward = False
        self._kinds = self._owned() if record else {}
        if record and self._allocator is not None:
            self._blocks_before = self._allocator.handed_out()

    def note_batch(self, tensors: Iterable[Tensor]) -> None:
        """Note in the recording that these are the batch."""
        if self._recording is not None:
            for storage in addresses(tensors):
                self._name(storage, holder.BATCH)

    def origins(self, *, complete: bool = True) -> StepOrigins:
        """Return where the storages of the recorded step come from; to be asked for before ``trace``."""
        resident: Counter[str] = Counter()
        for storage, kind in {**self._kinds, **self._owned()}.items():
            held = self._held.get(storage)
            if held is not None and held.counts:
                self._name(storage, kind)
                if held.step != self._step:
                    resident[kind] += rounded_up(held.size, self.rounding)
        return StepOrigins(self._origins, resident, complete)

    def trace(self, samples: int) -> MemoryTrace:
        """Return the recording, with the addresses of its storages and the sums of gradients."""
        trace = super().trace(samples)
        addresses = [0] * len(trace.sizes)
        handed_out = [0] * len(trace.sizes)
        for number, (address, blocks) in self._addresses.items():
            addresses[number] = address
            handed_out[number] = blocks
        return replace(trace, addresses=tuple(addresses), sums=tuple(self._sums), handed_out=tuple(handed_out))

    def _owned(self) -> dict[int, str]:
        """Return what storages are to the training, by their addresses; the first owner counts."""
        kinds: dict[int, str] = {}
        owned = self._owned_tensors()
        if owned is not None:
            for kind, tensors in owned().items():
                for storage in addresses(tensors):
                    kinds.setdefault(storage, kind)
        return kinds

    def _name(self, storage: int, kind: str) -> None:
        held = self._held.get(storage)
        if held is None or not held.counts:
            return
        if held.step != self._step:
            self._kinds.setdefault(storage, kind)
        elif not (kind == holder.LOGITS and self._origins[held.number].kind):
            self._origins[held.number] = replace(self._origins[held.number], kind=kind)

    def _number(self, recording: Recording, held: HeldStorage) -> None:
        super()._number(recording, held)
        if held.step == self._step:
            self._origins[held.number] = self._origin()
        elif held.key in self._kinds:  # alive before the step
            self._origins[held.number] = Origin("forward", "", self._kinds.pop(held.key))

    def _see(self, outputs: Iterable[Tensor], func: Any, args: Any, kwargs: Any) -> None:
        self._operation = func
        super()._see(outputs, func, args, kwargs)
        if self._recording is None:
            return
        if func is _ADD and torch._C._current_graph_task_id() != -1:
            self._note_sum(args[0], *outputs)
        if _described(func)[1]:
            for value in args:
                if isinstance(value, Tensor) and value.is_floating_point():
                    for storage in addresses([value]):
                        self._name(storage, holder.LOGITS)

    def _note_sum(self, gradient: Tensor, total: Tensor) -> None:
        """Note the storages of a gradient and of its sum with another, both of this step."""
        held = [self._held.get(storage) for storage in addresses((gradient, total))]
        numbers = [each.number for each in held if each and each.counts and each.step == self._step]
        if len(numbers) == 2:
            self._sums.append((numbers[0], numbers[1]))

    def _hold(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
        super()._hold(storage, counts=counts)
        if counts and self._recording is not None and self._allocator is not None:
            handed_out = self._allocator.handed_out() - self._blocks_before
            self._addresses[len(self._recording.sizes) - 1] = storage.data_ptr(), handed_out

    def _origin(self) -> Origin:
        operation, is_loss = _described(self._operation)
        kind = holder.LOGITS if is_loss else ""
        if torch._C._current_graph_task_id() != -1:
            self._was_backward = True
            return Origin("backward", operation, kind)
        # Marks cannot tell this: Lightning runs forward and backward passes in a closure, inside the optimizer's step.
        updates = self._was_backward and not torch.is_grad_enabled()
        return Origin("update" if updates else "forward", operation, kind)


def state_of(tensors: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> dict[str, list[Tensor]]:
    """Return parameters with buffers, their gradients, and the tensors of optimizers, by what they are."""
    known = list(tensors)
    gradients = [tensor.grad for tensor in known if tensor.is_leaf and tensor.grad is not None]
    state: list[Tensor] = []
    for optimizer in optimizers:
        for values in optimizer.state.values():
            state += [value for value in values.values() if isinstance(value, Tensor)]
    return {holder.PARAMETERS: known, holder.GRADIENTS: gradients, holder.OPTIMIZER: state}


@cache
def _described(operation: Any) -> tuple[str, bool]:
    """Return the name of an operation, and whether it is one of a loss of logits."""
    name = str(operation).removeprefix("aten.").split(".")[0].strip("_")
    return name, name.startswith(_LOSSES)
