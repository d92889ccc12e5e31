"""See in forward passes alone what each submodule would free if it were computed again, and in how many seconds.

What autograd saves in these passes is counted and dropped, so that they need little more memory than a forward pass
without gradients: they run where no step fits. If the step differentiates within its forward pass (a gradient penalty),
zeros stand for what was dropped: the values are wrong then, the sizes are not.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat.patching import replaced, shadowed
from lightning_ga.memory.device import synchronize
from lightning_ga.memory.live_tensors import compiled_run_eagerly, plain_tensors
from lightning_ga.memory.oom import release
from lightning_ga.recompute.choice import Candidate
from lightning_ga.recompute.comparison import difference

PASSES = 3  # of which the fastest counts
Step = Callable[[], object]


def survey(module: Module, step: Step, small_step: Step | None = None) -> Candidate:
    """Return what the submodules that a step calls would free, and how long they take.

    Only forward passes run: the first backward pass ends each. The caller puts the state back.

    Args:
        module: The module.
        step: Runs a training step, from the same state and on the same samples each time.
        small_step: A step on few samples, in which each submodule has to give the same gradient with and without being
            computed again; others are refused, and logged in a sentence each. ``None`` compares nothing.

    Returns:
        The whole module, whose parts are candidates.
    """
    parts = {name: part for name, part in module.named_modules() if name and not _is_compiled(part)}
    seen = _Survey(module, parts)
    for _ in range(PASSES):
        seen.run(step)
    if small_step is not None:
        for name, reason in compare(parts, small_step).items():
            seen.refused.add(name)
            rank_zero_info(f"{name} keeps its activations: {reason}")
    return seen.candidate("")


def compare(parts: dict[str, Module], step: Step) -> dict[str, str]:
    """Return which submodules differ if they are computed again, and in what.

    Each runs by itself in its first call, with its real arguments, and its outputs are differentiated: the step as a
    whole needs no backward pass.
    """
    found: dict[str, str] = {}
    running: list[str] = []  # parts of it are compared later, when nothing is kept for it

    def compared(name: str, part: Module, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and name not in found and not running:
            running.append(name)
            found[name] = difference(part, name, forward, arguments, named)
            running.clear()
        return forward(*arguments, **named)

    with _forward_only(parts, compared):
        step()
    return {name: reason for name, reason in found.items() if reason}


class _ForwardIsOver(BaseException):
    """The step has begun its backward pass; no error, so that nothing in the step catches it."""


@contextmanager
def _forward_only(parts: dict[str, Module], run: Callable[..., Any]) -> Iterator[None]:
    """Return a context that ends with the first backward pass; ``run`` gets name and part, and runs forward passes."""

    def end(*_: object, **__: object) -> None:
        raise _ForwardIsOver

    over: BaseException | None = None
    with compiled_run_eagerly(), replaced(torch.autograd, backward=end), ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(shadowed(part, "forward", partial(run, name, part, part.forward)))
        try:
            with saved_tensors_hooks(_drop, _zeros):
                yield
        except _ForwardIsOver as error:
            over = error
    if over is not None:
        release(over)


def _drop(tensor: Tensor) -> Any:
    if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tensor


def _zeros(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    shape, stride, dtype, device = saved
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _is_compiled(part: Module) -> bool:
    return hasattr(part, "_orig_mod") or isinstance(part, torch.jit.ScriptModule)


def _inside_compiled() -> bool:
    """Return whether a function of the caller's is compiled: Dynamo cannot trace what stands in for a forward pass."""
    return any(frame.f_code.co_qualname.startswith("_TorchDynamoContext.__call__") for frame, _ in walk_stack(None))


class _Survey:
    """Notes what submodules save in the forward pass of a step, their arguments and seconds."""

    def __init__(self, root: Module, parts: dict[str, Module]) -> None:
        self.seconds: dict[str, float] = {}  # of the fastest pass
        self.refused: set[str] = set()
        self._root = root
        self._parts = parts
        self._device = next((each.device for each in root.parameters()), torch.device("cpu"))

    def run(self, step: Step) -> None:
        """Run a forward pass; what it saves counts, and not what passes before have saved."""
        self._saved: dict[str, Counter[StorageWeakRef]] = defaultdict(Counter)
        self._inputs: dict[str, set[StorageWeakRef]] = defaultdict(set)
        self._inner: dict[str, dict[str, None]] = defaultdict(dict)  # submodules by the call around them
        self._inside = [""]
        self._versions: list[tuple[str, Tensor, int]] = []  # of arguments
        self._running: dict[str, float] = defaultdict(float)  # seconds
        self._sizes: dict[StorageWeakRef, int] = {}
        for each in self._storages([*self._root.parameters(), *self._root.buffers()]):
            self._sizes[each] = 0  # they cost nothing more
        with _forward_only(self._parts, self._call), saved_tensors_hooks(self._pack, _zeros):
            self._timed("", step)
        for name, seconds in self._running.items():
            self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        for name, witness, version in self._versions:
            if witness._version != version:
                self.refused.add(name)  # its arguments are written to in place

    def candidate(self, name: str) -> Candidate:
        """Return a submodule with all that it calls."""
        inner = tuple(map(self.candidate, self._inner[name]))
        return Candidate(name, self._frees(name), self.seconds[name], inner, name in self.refused)

    def _frees(self, name: str) -> int:
        """Return the bytes that only this submodule keeps, less the arguments that it would have to keep."""
        every = self._saved[""]
        inputs = self._inputs[name]
        alone = [storage for storage, times in self._saved[name].items() if times == every[storage]]
        freed = sum(self._sizes[storage] for storage in alone if storage not in inputs)
        return freed - sum(self._sizes[storage] for storage in inputs - every.keys())

    def _storages(self, values: Any) -> set[StorageWeakRef]:
        """Return the storages of tensors; a weak reference keeps their addresses from being used again."""
        found = set()
        for tensor in tensors_in(values):
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                key = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._sizes.setdefault(key, storage.nbytes())
                found.add(key)
        return found

    def _call(self, name: str, part: Module, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() or name in self._inside:
            return forward(*arguments, **named)
        self._inner[self._inside[-1]][name] = None
        self._inputs[name] |= self._storages((arguments, named))
        for tensor in tensors_in((arguments, named)):
            witness = tensor.detach()  # it shares the version, and lets the memory go
            witness.data = tensor.new_empty(0)
            self._versions.append((name, witness, witness._version))
        if _inside_compiled():
            self.refused.add(name)
        with replaced(self, _inside=[*self._inside, name]):
            return self._timed(name, forward, *arguments, **named)

    def _timed(self, name: str, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run something; its seconds are those of the processor if there is no device."""
        clock = time.process_time if self._device.type == "cpu" else time.perf_counter
        synchronize(self._device)
        started = clock()
        try:
            return run(*arguments, **named)
        finally:
            synchronize(self._device)
            self._running[name] += clock() - started

    def _pack(self, tensor: Tensor) -> Any:
        made = self._storages(tensor)
        for name in {*self._inside}:
            self._saved[name].update(made)
        return _drop(tensor)
