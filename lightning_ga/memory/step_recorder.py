"""Record the allocations and releases of a step, and where each of its storages is made.

Tested in tests/memory/test_live_tensors.py and tests/integration/test_peak_holders.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.holders import Origin, StepOrigins
from lightning_ga.memory.live_tensors import HeldStorage, LiveTensorMeter, addresses
from lightning_ga.memory.trace import MemoryTrace, Stream
from lightning_ga.plan import records as holder

Owned = Callable[[], Mapping[str, Iterable[Tensor]]]  # a method of a training: tensors of its state, by what they are
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy", "binary_cross_entropy_with_logits")


class Recording:
    """The stream of a step so far, and what is known of its storages."""

    def __init__(self, alive: int, kinds: dict[int, str]) -> None:
        self.stream = Stream(alive)
        self.marks: list[int] = []  # places in the stream at which a phase ends
        self.origins: dict[int, Origin] = {}  # by number
        self.kinds = kinds  # of storages that were there before, by their addresses


class StepRecorder(LiveTensorMeter):  # type: ignore[no-untyped-call]
    """Meters live tensors of a training, and records where they are made, and by which blocks of an allocator."""

    def __init__(self, owned: Owned, allocator: AllocatorMeter | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        # A meter lives until the garbage collector comes, because storages call it as they die; the training need not.
        self._owned_tensors = WeakMethod(owned)
        self._allocator = allocator
        self._blocks_before = 0
        self._recording: Recording | None = None  # of the step
        self._operation = ("", False)  # name, and whether it is one of a loss of logits
        self._was_backward = False

    def start(self, *, budget: int | None = None, record: bool = True) -> None:
        """Begin a step: the peak starts at what is alive, and what is alive is known by its owners."""
        super().start(budget=budget)
        self._was_backward = False
        self._recording = Recording(self.live_bytes, self._owned()) if record else None
        if record and self._allocator is not None:
            self._blocks_before = self._allocator.handed_out()

    def mark(self) -> None:
        """Note in the recording that a phase of the step ends here."""
        if self._recording is not None:
            self._recording.marks.append(len(self._recording.stream.events))

    def note_batch(self, tensors: Iterable[Tensor]) -> None:
        """Note in the recording that these are the batch."""
        if self._recording is not None:
            self._name(self._recording, addresses(tensors), holder.BATCH)

    def recorded(self, samples: int, *, complete: bool = True) -> tuple[MemoryTrace, StepOrigins]:
        """Return the recorded step of so many samples, and where its storages come from, and end the recording."""
        recording = self._recording
        assert recording is not None, "a step is recorded from start() on"
        resident: Counter[str] = Counter()
        kinds = {**recording.kinds, **self._owned()}
        for held in self._counted(kinds):
            self._name(recording, [held.key], kinds[held.key])
            if held.recording is not recording:
                resident[kinds[held.key]] += held.bytes
        self._recording = None
        trace = recording.stream.trace(samples, recording.marks)
        return trace, StepOrigins(recording.origins, resident, complete)

    def _owned(self) -> dict[int, str]:
        """Return what storages are to the training, by their addresses; the first owner counts."""
        kinds: dict[int, str] = {}
        owned = self._owned_tensors()
        if owned is not None:
            for kind, tensors in owned().items():
                for storage in addresses(tensors):
                    kinds.setdefault(storage, kind)
        return kinds

    def _counted(self, storages: Iterable[int]) -> Iterator[HeldStorage]:
        """Yield those storages that are known and counted, by their addresses."""
        for storage in storages:
            held = self._held.get(storage)
            if held is not None and held.counts:
                yield held

    def _name(self, recording: Recording, storages: Iterable[int], kind: str) -> None:
        """Note what storages are, by their addresses; logits may be more than that."""
        for held in self._counted(storages):
            if held.recording is not recording:
                recording.kinds.setdefault(held.key, kind)
            elif kind != holder.LOGITS or not recording.origins[held.number].kind:
                recording.origins[held.number] = recording.origins[held.number]._replace(kind=kind)

    def _see(self, outputs: Iterable[Tensor], func: Any, args: Any, kwargs: Any) -> None:
        self._operation = _described(func)
        super()._see(outputs, func, args, kwargs)
        recording = self._recording
        if recording is not None and self._operation[1]:
            for value in args:
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._name(recording, addresses([value]), holder.LOGITS)

    def _hold(self, storage: torch.UntypedStorage, *, counts: bool) -> HeldStorage:
        held = super()._hold(storage, counts=counts)
        recording = self._recording
        if counts and recording is not None:
            address = handed_out = 0
            if self._allocator is not None:
                address = storage.data_ptr()
                handed_out = self._allocator.handed_out() - self._blocks_before
            held.recording = recording
            held.number = recording.stream.allocate(held.size, address, handed_out)
            recording.origins[held.number] = self._origin()
        return held

    def _released(self, held: HeldStorage) -> None:
        super()._released(held)
        recording = self._recording
        if not held.counts or recording is None:
            return
        if held.recording is recording:
            recording.stream.events.append(~held.number)
            return
        number = recording.stream.release_older(held.size, held.bytes)
        if held.key in recording.kinds:
            recording.origins[number] = Origin("forward", "", recording.kinds.pop(held.key))

    def _origin(self) -> Origin:
        if torch._C._current_graph_task_id() != -1:
            self._was_backward = True
            return _made_in("backward", *self._operation)
        # Marks cannot tell this: Lightning runs forward and backward passes in a closure, inside the optimizer's step.
        updates = self._was_backward and not torch.is_grad_enabled()
        return _made_in("update" if updates else "forward", *self._operation)


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


@cache
def _made_in(phase: str, operation: str, is_loss: bool) -> Origin:
    """Return the origin of what an operation makes, the same object whenever it does."""
    return Origin(phase, operation, holder.LOGITS if is_loss else "")
