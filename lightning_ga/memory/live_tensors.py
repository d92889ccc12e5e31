"""Count the bytes of live tensors, to the byte and on any device: a dispatch mode sees every operation.

``lightning_ga.testing.limit_memory`` says what is counted. Other older tensors are not, because beside a real device a
data set and its labels would lie on the host.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_ga.memory.trace import rounded_up

_LEAVES: tuple[type, ...] = (Tensor, int, float, bool, type(None), torch.dtype, torch.device)
_PLAIN: tuple[type, ...] = (Tensor, Parameter)
# Operations whose output was made just now, although it is their own argument.
_CREATES = (torch.ops.aten.lift_fresh.default, torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default)
# Adds to a sparse tensor in place by making its parts anew: how backward passes accumulate sparse gradients.
_ADDS = torch.ops.aten.add_.Tensor


class HeldStorage(weakref.ref[torch.UntypedStorage]):
    """A known storage: its bytes, and whether they are counted."""

    __slots__ = ("bytes", "counts", "key", "number", "recording", "size")

    key: int  # address of the storage: unique as long as it lives
    size: int
    bytes: int  # rounded up as an allocator does
    counts: bool
    recording: object  # of the step in which it was allocated; ``None`` without one
    number: int  # in that recording


_uncounted = ContextVar("uncounted", default=False)


@contextmanager
def uncounted() -> Iterator[None]:
    """Return a context in which new tensors never count: snapshots and the like lie on the host beside a device."""
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)


_eager: list[Any] = []  # the compiler's stance for each context within which compiled functions run as written


@contextmanager
def compiled_run_eagerly() -> Iterator[None]:
    """Return a context in which compiled functions run as they were written; none are if no compiler is loaded.

    Within a dispatch mode they would anyhow, but for those with ``fullgraph=True``, which raise (torch 2.6 to 2.15).
    The stance is that of all threads: the first that enters sets it, and the last that leaves puts it back.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _eager.append(_eager[0] if _eager else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        stance = _eager.pop()
        if not _eager:
            stance.__exit__(None, None, None)


class LiveTensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meters live tensor bytes; with a budget, it emulates a device that runs out of memory.

    Entered again, it knows the storages that have survived. A dispatch mode belongs to one thread; autograd carries it
    to its own.
    """

    supports_higher_order_operators = True
    active: ClassVar[list["LiveTensorMeter"]] = []

    def __init__(
        self, *, budget: int | None = None, device: torch.device | str | None = None, rounding: int = 1
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget = budget  # bytes; ``None`` is no bound
        self.device = None if device is None else torch.device(device)  # ``None`` counts on every device
        self.rounding = rounding  # bytes that every storage is rounded up to: 1 on a CPU, 512 for CUDA's allocator
        self.live_bytes = self.peak_bytes = 0  # now, and most at once within the budget since the start
        self.wanted_bytes = 0  # that would have been alive at the last operation that was refused
        self._held: dict[int, HeldStorage] = {}
        self._stances: list[AbstractContextManager[Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let PyTorch leave out its guard against the compiler, which takes longer than many operations do.

        Nothing is compiled within the mode (``torch/utils/_python_dispatch.py`` of 2.15, ``__init_subclass__``).
        """
        return False

    def __enter__(self) -> Self:
        """Count from here on; compiled functions run as they were written."""
        self._stances.append(compiled_run_eagerly())
        self._stances[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count what it created."""
        for arg in args:
            kind = type(arg)
            if kind is Parameter:
                self._touch(arg)
            elif kind in _LEAVES:
                continue
            elif kind is list or kind is tuple:
                for item in arg:
                    if type(item) is Parameter:
                        self._touch(item)
            elif getattr(arg, "_is_param", False):
                self._touch(arg)
        out = func(*args, **(kwargs or {}))
        if args and out is args[0] and type(out) in _PLAIN and func not in _CREATES and out.layout is torch.strided:
            return out  # in place: nothing is new
        if isinstance(out, Tensor):
            self._see((out,), func, args, kwargs)
        elif isinstance(out, (list, tuple)):
            self._see([item for item in out if isinstance(item, Tensor)], func, args, kwargs)
        return out

    def add(self, tensors: Iterable[Tensor | None]) -> None:
        """Count tensors that already exist: each storage once, ``None`` and meta tensors ignored."""
        self._adopt(tensors)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def start(self, *, budget: int | None = None) -> None:
        """Begin a step: the peak starts at the live bytes. A budget applies at once."""
        if budget is not None:
            self.budget = budget
        self.peak_bytes = self.live_bytes
        self.wanted_bytes = 0

    def _counts(self, tensor: Tensor) -> bool:
        device = tensor.device
        wanted = self.device
        if wanted is None:
            return device.type != "meta"
        return device == wanted or (wanted.index is None and device.type == wanted.type)

    def _touch(self, parameter: Tensor) -> None:
        """Count a parameter, and its gradient, at the first operation that uses it."""
        storage = _storage_of(parameter)
        if storage is not None and storage._cdata in self._held:
            return
        before = self.live_bytes
        self._adopt((parameter, parameter.grad))
        if self.live_bytes > before:
            self._check(self.live_bytes - before)

    def _adopt(self, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is None:
                continue
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                held = self._held.get(storage._cdata)
                if held is None or not held.counts:
                    self._hold(storage, counts=self._counts(plain))

    def _see(self, outputs: Iterable[Tensor], func: Any, args: Any, kwargs: Any) -> None:
        """Count the storages of an operation's outputs, except older ones that do not count."""
        older: set[int] | None = None
        for tensor in outputs:
            storage = _storage_of(tensor)
            if storage is None:
                made_by = func
                if func is _ADDS and tensor.layout is torch.sparse_coo:
                    made_by = _CREATES[0]
                self._see(plain_tensors(tensor), made_by, args, kwargs)
                continue
            held = self._held.get(storage._cdata)
            if held is not None:
                if held.counts and held.size != storage.nbytes():
                    self._resize(storage, held)
                continue
            if older is None:
                older = set() if func in _CREATES else _taken(args, kwargs)
            counts = storage._cdata not in older and self._counts(tensor) and not _uncounted.get()
            held = self._hold(storage, counts=counts)
            if counts:
                self._check(held.size)

    def _resize(self, storage: torch.UntypedStorage, held: HeldStorage) -> None:
        """Count a storage that was resized: the new block is there before the old one dies."""
        self._hold(storage, counts=True)
        try:
            self._check(storage.nbytes())
        finally:
            self._released(held)

    def _hold(self, storage: torch.UntypedStorage, *, counts: bool) -> HeldStorage:
        held = HeldStorage(storage, self._on_death)
        held.key = storage._cdata
        held.size = storage.nbytes()
        held.bytes = held.size if self.rounding == 1 else rounded_up(held.size, self.rounding)
        held.counts = counts
        held.recording = None
        self._held[held.key] = held
        if counts:
            self.live_bytes += held.bytes
        return held

    def _check(self, size: int) -> None:
        """Raise if the last ``size`` bytes were too many, else note the peak."""
        if self.budget is not None and self.live_bytes > self.budget:
            self.wanted_bytes = self.live_bytes
            raise torch.OutOfMemoryError(
                f"Live tensors out of memory. Tried to allocate {size:,} bytes: {self.live_bytes:,} bytes would be "
                f"alive, in a budget of {self.budget:,} bytes."
            )
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _on_death(self, held: "weakref.ref[torch.UntypedStorage]") -> None:
        assert isinstance(held, HeldStorage)
        if self._held.get(held.key) is held:
            del self._held[held.key]
            self._released(held)

    def _released(self, held: HeldStorage) -> None:
        if held.counts:
            self.live_bytes -= held.bytes


def _taken(args: Any, kwargs: Any) -> set[int]:
    """Return the addresses of an operation's arguments: an output in one of them was not created by it."""
    tensors: list[Tensor] = []
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return set(addresses(tensors))


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Return the addresses of the storages of tensors."""
    found: list[int] = []
    for tensor in tensors:
        storage = _storage_of(tensor)
        if storage is None:
            found += addresses(plain_tensors(tensor))
        else:
            found.append(storage._cdata)
    return found


def plain_tensors(tensor: Tensor) -> Iterable[Tensor]:
    """Return the tensors with storage behind a tensor: itself, a sparse tensor's parts, a subclass's inner tensors."""
    if _storage_of(tensor) is not None:
        return (tensor,)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        found: list[Tensor] = []
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh of devices too
                found += plain_tensors(part)
        return found
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage that contains the tensor's data; ``None`` for sparse, opaque and wrapper tensors."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter and is_traceable_wrapper_subclass(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
