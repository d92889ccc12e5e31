"""See in forward passes alone what each submodule would free if it were computed again, and in how many seconds.

What autograd saves in these passes is counted and dropped, so that they need little more memory than a forward pass
without gradients: they run where no step fits. If the step differentiates within its forward pass (a gradient penalty),
zeros stand for what was dropped: the values are wrong then, the sizes are not.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat.patching import replaced, shadowed
from lightning_ga.memory.device import synchronize
from lightning_ga.memory.live_tensors import LiveTensorMeter, addresses, compiled_run_eagerly
from lightning_ga.recompute.choice import PARTS, Candidate
from lightning_ga.recompute.comparison import Comparison

TIMED = 2  # forward passes, of which the faster one counts
Step = Callable[[], object]
Storage = tuple[int, int]  # number in the step and bytes; of a storage from before the step: its address and none


def survey(module: Module, step: Step, small_step: Step | None = None) -> Candidate:
    """Return what the submodules that a step calls would free, and how long they take.

    Only forward passes run, five in all: the first backward pass ends each. The caller puts the state back.

    Args:
        module: The module.
        step: Runs a training step, from the same state and on the same samples each time.
        small_step: A step on few samples, in which each submodule that may be chosen has to give the same gradient
            with and without being computed again; others are refused. ``None`` compares nothing.

    Returns:
        The whole module, whose parts are candidates.
    """
    parts = {name: part for name, part in module.named_modules() if name and not _is_compiled(part)}
    counted = _Survey(module, parts, step)
    times = [_seconds(module, parts, step) for _ in range(TIMED)]
    root = counted.candidate("", {name: min(each[name] for each in times) for name in times[0]})
    compared: set[str] = set()
    while small_step is not None:
        found = {name for part in PARTS for name in root.chosen(root.frees / part)} - compared
        if not found:
            break
        compared |= found
        root = root.refusing(compare({name: parts[name] for name in found}, small_step))
    return root


def compare(parts: dict[str, Module], step: Step) -> dict[str, str]:
    """Return in what submodules differ if they are computed again, in a sentence each.

    Each runs by itself in its first call, with its real arguments, and its outputs are differentiated: the step as a
    whole needs no backward pass.
    """
    comparisons = {name: Comparison(name, part) for name, part in parts.items()}
    with _forward_only(), ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(shadowed(part, "forward", comparisons[name]))
        step()
    return {name: each.difference for name, each in comparisons.items() if each.difference}


class _ForwardIsOver(BaseException):
    """The step has begun its backward pass; no error, so that nothing in the step catches it."""


@contextmanager
def _forward_only() -> Iterator[None]:
    """Return a context which ends with the first backward pass, and in which nothing that autograd saves is kept."""

    def end(*_: object, **__: object) -> None:
        raise _ForwardIsOver

    with (
        suppress(_ForwardIsOver),
        compiled_run_eagerly(),
        replaced(torch.autograd, backward=end),
        saved_tensors_hooks(_drop, _zeros),
    ):
        yield


def _drop(tensor: Tensor) -> Any:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) if is_plain else tensor


def _zeros(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    shape, stride, dtype, device = saved
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _is_compiled(part: Module) -> bool:
    return hasattr(part, "_orig_mod") or isinstance(part, torch.jit.ScriptModule)


def _inside_compiled() -> bool:
    """Return whether a function of the caller's is compiled: Dynamo cannot trace what stands in for a forward pass."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname.startswith("_TorchDynamoContext.__call__"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _seconds(module: Module, parts: dict[str, Module], step: Step) -> dict[str, float]:
    """Return the seconds of the forward passes of each submodule in a step: of the processor if there is no device."""
    found = defaultdict[str, float](float)
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def timed(name: str, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        synchronize(device)
        started = clock()
        try:
            return forward(*arguments, **named)
        finally:
            synchronize(device)
            found[name] += clock() - started

    def whole() -> None:
        with _forward_only(), ExitStack() as stack:
            for name, part in parts.items():
                stack.enter_context(shadowed(part, "forward", partial(timed, name, part.forward)))
            step()

    timed("", whole)
    return found


class _Survey(LiveTensorMeter):  # type: ignore[no-untyped-call]
    """Notes what submodules save in the forward pass of a step, and whose arguments are written to."""

    def __init__(self, root: Module, parts: dict[str, Module], step: Step) -> None:
        super().__init__()
        self._saved: dict[str, Counter[Storage]] = defaultdict(Counter)
        self._inputs: dict[str, set[Storage]] = defaultdict(set)
        self._takers: dict[Storage, set[str]] = defaultdict(set)  # submodules that have got a storage
        self._inner: dict[str, dict[str, None]] = defaultdict(dict)  # submodules by the call around them
        self._refused: dict[str, str] = {}
        self._inside = [""]
        self.add([*root.parameters(), *root.buffers()])
        self.start(record=True)
        with _forward_only(), ExitStack() as stack, self, saved_tensors_hooks(self._pack, _zeros):
            for name, part in parts.items():
                stack.enter_context(shadowed(part, "forward", partial(self._call, name, part.forward)))
            step()

    def candidate(self, name: str, seconds: dict[str, float]) -> Candidate:
        """Return a submodule with all that it calls."""
        inner = tuple(self.candidate(each, seconds) for each in self._inner[name])
        return Candidate(name, self._frees(name), seconds[name], inner, self._refused.get(name, ""))

    def _frees(self, name: str) -> int:
        """Return the bytes that only this submodule keeps, less the arguments that it would have to keep."""
        every = self._saved[""]
        saved = self._saved[name]
        inputs = {each for each in self._inputs[name] if each[1]}
        freed = [size for number, size in saved.keys() - inputs if saved[number, size] == every[number, size]]
        return sum(freed) - sum(size for _, size in inputs - every.keys())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see whose arguments it writes to."""
        if func._schema.is_mutable:
            values = {**dict(zip((each.name for each in func._schema.arguments), args)), **(kwargs or {})}
            signature = {each.name: each for each in func._schema.arguments}
            written = [value for name, value in values.items() if (of := signature[name].alias_info) and of.is_write]
            for storage in self._storages(written):
                for name in self._takers.get(storage, ()):
                    self._refused[name] = f"{name} keeps its activations: its arguments are written to in place."
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _storages(self, values: Any) -> set[Storage]:
        """Return the storages of tensors."""
        found: set[Storage] = set()
        for address in addresses(tensors_in(values)):
            held = self._held.get(address)
            is_new = held is not None and held.counts and held.step == self._step
            found.add((held.number, held.size) if held is not None and is_new else (address, 0))
        return found

    def _call(self, name: str, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() or name in self._inside:
            return forward(*arguments, **named)
        self._inner[self._inside[-1]][name] = None
        inputs = self._storages((arguments, named))
        self._inputs[name] |= inputs
        for storage in inputs:
            self._takers[storage].add(name)
        if _inside_compiled():
            self._refused[name] = f"{name} keeps its activations: it is part of compiled code."
        with replaced(self, _inside=[*self._inside, name]):
            return forward(*arguments, **named)

    def _pack(self, tensor: Tensor) -> Any:
        made = {each for each in self._storages(tensor) if each[1]}
        for name in {*self._inside}:
            self._saved[name].update(made)
        return _drop(tensor)
