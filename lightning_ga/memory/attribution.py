"""What holds the memory at the peak of a step: parameters, gradients, optimizer, activations of which blocks.

A recorded step (``MemoryTrace``) says which storages are alive when most bytes are. ``OriginMeter`` records
besides where each was made, with hooks on modules for the time of the recording alone; ``attribute`` adds
them up. The parts sum to the peak.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.memory.trace import MemoryTrace, replay

PARAMETERS, GRADIENTS, OPTIMIZER, BATCH = "parameters", "gradients", "optimizer state", "batch"
BEFORE = "alive before the step"
KEPT, ACTIVATIONS, TEMPORARIES = "kept after the step, made in", "activations of", "temporaries of"
REMEDIES = {
    PARAMETERS: "a lower precision (bf16-true), or a strategy that shards the model",
    GRADIENTS: "a lower precision (bf16-true), or a strategy that shards the model",
    OPTIMIZER: "an optimizer with less state (SGD, Adafactor, 8-bit Adam), or a strategy that shards it",
    BATCH: "a smaller micro-batch",
    BEFORE: "delete what earlier steps have left, or keep it on the host",
    KEPT: "the step appends tensors to something that outlives it: keep .detach().cpu() or a number instead",
    ACTIVATIONS: "activation checkpointing of these blocks, mixed precision, or a smaller micro-batch",
    TEMPORARIES: "a fused operation (scaled_dot_product_attention, a chunked loss), or a smaller micro-batch",
}
MOST_BLOCKS = 3
NODE_NAME = "lightning_ga.module"  # in the metadata of autograd's nodes: which module made them


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a storage was made.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"update"``.
        place: The module that ran, by its name; the operation, outside of modules and in the backward pass.
        kind: ``"parameters"``, ``"gradients"``, ``"optimizer state"`` or ``"batch"``; empty for anything else.
    """

    phase: str
    place: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Attribution:
    """What is alive at the peak of a step.

    Attributes:
        peak_bytes: Most bytes alive at once.
        phase: In which phase that was.
        place: Which module ran then.
        parts: Bytes by what holds them, the largest first; they sum to the peak.
    """

    peak_bytes: int
    phase: str
    place: str
    parts: tuple[tuple[str, int], ...]

    def by_kind(self) -> list[tuple[str, int]]:
        """Bytes by kind, the largest first; they sum to the peak too."""
        kinds: Counter[str] = Counter()
        for name, size in self.parts:
            kinds[kind_of(name)] += size
        return kinds.most_common()

    @property
    def remedy(self) -> str:
        """What usually makes the largest kind smaller."""
        return REMEDIES[self.by_kind()[0][0]] if self.parts else ""

    def lines(self, amount: Callable[[int], str] = "{:,} bytes".format) -> tuple[str, str, str]:
        """Where the peak is, what holds it, and the usual remedy, in three lines.

        Args:
            amount: Bytes as text.
        """
        told = [
            f"{amount(size)} {kind.removesuffix(' of')}{self._largest_blocks(kind, amount)}"
            for kind, size in self.by_kind()
        ]
        where = f"in the {self.phase} pass" if self.phase != "update" else "in the optimizer's step"
        return (
            f"peak of {amount(self.peak_bytes)} {where}, at {self.place}",
            f"held by {', '.join(told)}",
            f"the largest part is made smaller by {self.remedy}",
        )

    def _largest_blocks(self, kind: str, amount: Callable[[int], str]) -> str:
        blocks: Counter[str] = Counter()
        for name, size in self.parts:
            if kind_of(name) == kind and name != kind:
                blocks[block(name.removeprefix(kind).strip())] += size
        told = [f"{name} {amount(size)}" for name, size in blocks.most_common(MOST_BLOCKS)]
        more = [f"{len(blocks) - MOST_BLOCKS} more"] if len(blocks) > MOST_BLOCKS else []
        return f" ({', '.join([*told, *more])})" if told else ""


def kind_of(name: str) -> str:
    """The kind of a part, without its place.

    Examples:
        >>> kind_of("activations of head"), kind_of("parameters")
        ('activations of', 'parameters')
    """
    return next(kind for kind in REMEDIES if name.startswith(kind))


def block(name: str) -> str:
    """The block of a network that a module belongs to: its name up to the first number.

    Examples:
        >>> block("net.blocks.11.mlp.fc1"), block("head")
        ('net.blocks.11', 'head')
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def attribute(
    trace: MemoryTrace, origins: Mapping[int, Origin], resident: Mapping[str, int], *, rounding: int = 1
) -> Attribution:
    """Say what holds the memory at the peak of a recorded step.

    Args:
        trace: The step.
        origins: Where each of its storages was made, by its number in the trace; those alive before it are missing.
        resident: What is known of storage 0, which stands for all that outlived the step: name and bytes.
        rounding: Bytes that every storage is rounded up to.

    Examples:
        >>> trace = MemoryTrace(2, sizes=(100, 8, 16, 4), events=(0, 1, 2, 3, ~3, ~2, ~1))
        >>> made = {1: Origin("forward", "a"), 2: Origin("forward", "b"), 3: Origin("backward", "b")}
        >>> attribute(trace, made, {"parameters": 100}).parts
        (('parameters', 100), ('activations of b', 16), ('activations of a', 8), ('temporaries of b', 4))
    """
    end = peak_event(trace, rounding)
    alive = set(trace.events[: end + 1]) - {~event for event in trace.events[: end + 1] if event < 0}
    released = {~event: place for place, event in enumerate(trace.events) if event < 0}
    phases = phase_by_event(trace, origins)
    held: Counter[str] = Counter()
    for number in (event for event in alive if event > 0):
        last = phases[released[number]] if number in released else None
        held[part_name(origins.get(number), last)] += -(-trace.sizes[number] // rounding) * rounding
    if 0 in alive:
        floor = -(-trace.sizes[0] // rounding) * rounding
        for name, size in resident.items():
            held[name] += min(size, floor)
            floor -= min(size, floor)
        held[BEFORE] += floor
    at = next(
        (origins[event] for event in reversed(trace.events[: end + 1]) if event in origins), Origin("forward", "")
    )
    parts = tuple((name, size) for name, size in held.most_common() if size)
    return Attribution(trace.peak(rounding), at.phase, at.place or "the step itself", parts)


def peak_event(trace: MemoryTrace, rounding: int) -> int:
    """The first event after which most bytes are alive."""
    peak, alive = replay(trace.sizes, trace.events, rounding), 0
    for place, event in enumerate(trace.events):
        size = -(-trace.sizes[event if event >= 0 else ~event] // rounding) * rounding
        alive += size if event >= 0 else -size
        if alive == peak:
            return place
    return 0


def phase_by_event(trace: MemoryTrace, origins: Mapping[int, Origin]) -> list[str]:
    """The phase in which each event happened: that of the last storage that was made."""
    phase, phases = "forward", []
    for event in trace.events:
        phase = origins[event].phase if event in origins else phase
        phases.append(phase)
    return phases


def part_name(origin: Origin | None, released_in: str | None) -> str:
    """What a storage is to a reader: state, an activation, a temporary, or something that was kept."""
    if origin is None:
        return BEFORE
    if origin.kind:
        return origin.kind
    place = origin.place or "the step itself"
    if released_in is None:
        return f"{KEPT} {place}"
    if origin.phase == "backward" and released_in == "update":
        return GRADIENTS
    return f"{ACTIVATIONS if origin.phase != released_in else TEMPORARIES} {place}"


class OriginMeter(LiveTensorMeter):  # type: ignore[no-untyped-call]
    """A meter that records where storages are made, besides how large they are and how long they live.

    Args:
        module: The module whose parts are named.
        **arguments: See ``LiveTensorMeter``.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._names = {part: name for name, part in module.named_modules() if name}
        self._stack: list[str] = []
        self._origins: dict[int, Origin] = {}
        self._operation = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context that records a step, with hooks that tell which module runs."""

        def enter(part: nn.Module, inputs: Any) -> None:
            name_nodes(inputs, self._stack[-1] if self._stack else "")
            self._stack.append(self._names.get(part, self._stack[-1] if self._stack else ""))

        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            name_nodes(outputs, self._stack.pop())

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        self._origins.clear()
        self.start(record=True)
        try:
            with self:
                yield
        finally:
            self._stack.clear()
            for hook in hooks:
                hook.remove()

    def attribution(
        self, module: nn.Module, optimizers: Iterable[Optimizer] = (), batch: Iterable[Tensor] = ()
    ) -> Attribution:
        """What holds the memory at the peak of the recorded step. Ends the recording.

        Args:
            module: Whose parameters and gradients are told apart.
            optimizers: Whose state is told apart.
            batch: Tensors of the batch.
        """
        resident: Counter[str] = Counter()
        for kind, tensors in {**state_of(module, optimizers), BATCH: list(batch)}.items():
            for storage in {tensor.untyped_storage()._cdata for tensor in tensors}:
                held = self._held.get(storage)
                if held is None or not held.counts:
                    continue
                if held.recording != self._recording:
                    resident[kind] += self._rounded(held.size)
                elif held.number in self._origins:
                    made = self._origins[held.number]
                    self._origins[held.number] = Origin(made.phase, made.place, kind)
        trace = self.trace(0)  # numbers its storages from 1
        origins = {number + 1: origin for number, origin in self._origins.items()}
        return attribute(trace, origins, resident, rounding=self.rounding)

    def _hold(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
        recorded = len(self._sizes)
        super()._hold(storage, counts=counts)
        if len(self._sizes) > recorded:
            self._origins[recorded] = self._origin()

    def _see(self, outputs: Iterable[Tensor], func: Any, args: Any, kwargs: Any) -> None:
        self._operation = str(func).removeprefix("aten.").split(".")[0].strip("_")
        super()._see(outputs, func, args, kwargs)

    def _origin(self) -> Origin:
        place = next((name for name in reversed(self._stack) if name), self._operation)
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            return Origin("backward", name_of(node) or place)
        return Origin("update", "the optimizer") if self._marks else Origin("forward", place)


def name_of(node: Any) -> str:
    """The module that made a node of the backward pass; empty where none did."""
    return str(node.metadata.get(NODE_NAME, "")) if node is not None else ""


def name_nodes(values: Any, name: str) -> None:
    """Name the nodes of the backward pass that lead to some tensors, those that have no name yet."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    todo: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while todo:
        node = todo.pop()
        if NODE_NAME not in node.metadata:
            node.metadata[NODE_NAME] = name
            todo += [before for before, _ in node.next_functions if before is not None]


def state_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, list[Tensor]]:
    """Parameters with buffers, gradients, and tensors of optimizers."""
    state = [value for optimizer in optimizers for values in optimizer.state.values() for value in values.values()]
    return {
        PARAMETERS: [*module.parameters(), *module.buffers()],
        GRADIENTS: [parameter.grad for parameter in module.parameters() if parameter.grad is not None],
        OPTIMIZER: [value for value in state if isinstance(value, Tensor)],
    }
