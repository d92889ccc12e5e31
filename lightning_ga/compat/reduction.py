"""Average the gradients of a window over ranks, while its last backward pass runs.

The reducer of ``DistributedDataParallel`` cannot go on where a pass was broken off: a rank that runs the pass again, in
pieces, would issue other collectives than the rest and hang them all. Here all ranks send copies of their gradients in
buckets, in the same order, each as soon as it is complete. If a pass fails, the averages of what it sent stay right:
they are set aside while the window runs again, and the other buckets are sent after that.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, compress
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Parameter

from lightning_ga.compat import patching
from lightning_ga.compat.gradient_dtype import dtype_of_sum
from lightning_ga.compat.ranks import sequence_number
from lightning_ga.errors import UserError
from lightning_ga.snapshot.copies import Gradients, counted_additions

BUCKET = 25 * 2**20  # bytes, as in DistributedDataParallel
IN_FLIGHT = 2  # buckets of which copies are kept: one is sent while the next is made
FIRST_BUCKET = 2**20  # bytes that are sent as soon as there are as many, as in DistributedDataParallel


class Bucket:
    """Dense gradients of one device that are sent together; ``last`` is the parameter whose gradient should come last.

    Gradients are sent as ``dtype``, and have that type afterwards. The message holds them, and which of them there are:
    thus a rank that lacks one learns whether another has it, and no other rank has to ask.
    """

    def __init__(self, parameters: tuple[Parameter, ...], last: Parameter, dtype: torch.dtype) -> None:
        self.parameters, self.last, self.dtype = parameters, last, dtype
        self.size = (sum(p.numel() for p in parameters) + len(parameters)) * dtype.itemsize  # bytes of the message

    def place(self, room: Tensor) -> None:
        """Let the message lie at the beginning of ``room``, which is a tensor of bytes."""
        self._message = room[: self.size].view(self.dtype)
        sizes = [parameter.numel() for parameter in self.parameters]
        *parts, self._present = torch.split(self._message, [*sizes, len(sizes)])
        # In the order of memory of the parameters, which ``DistributedDataParallel`` has seen to be that of all ranks.
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        self._parts = [part.as_strided(p.shape, order) for part, p, order in zip(parts, self.parameters, strides)]

    def join(self, gradients: Sequence[Tensor | None], scale: float) -> Tensor:
        """Write gradients to the message, times ``scale``, and return it."""
        there = [gradient is not None for gradient in gradients]
        if all(there):
            self._present.fill_(1)
        else:
            self._present.copy_(torch.tensor(there))
            torch._foreach_zero_([part for part, is_there in zip(self._parts, there) if not is_there])
        found = [gradient for gradient in gradients if gradient is not None]
        _copy([g.to_dense() if g.is_sparse else g for g in found], [*compress(self._parts, there)])
        return self._message.mul_(scale)

    def spread(self, gradients: Sequence[Tensor | None]) -> None:
        """Replace gradients by the averages, which are in the message; one that no rank has stays missing."""
        # Those that are there, of the type that is sent and not sparse, are overwritten.
        alike = [g is not None and g.dtype == self.dtype and not g.is_sparse for g in gradients]
        if not all(alike):
            there = zip(self.parameters, self._parts, self._present.tolist(), alike)
            lacking = [(p, part) for p, part, is_present, is_alike in there if is_present and not is_alike]
            # All are made before the first is given: if memory runs out, no parameter has a new one.
            for parameter, gradient in [(p, torch.empty_like(p, dtype=self.dtype).copy_(part)) for p, part in lacking]:
                parameter.grad = gradient
        _copy([*compress(self._parts, alike)], [*compress(gradients, alike)])


class SparseBucket:
    """A gradient that is sparse on every rank."""

    def __init__(self, parameter: Parameter, dtype: torch.dtype) -> None:
        self.parameters, self.last, self.dtype = (parameter,), parameter, dtype
        self._message = torch.empty(0)

    def join(self, gradients: Sequence[Tensor | None], scale: float) -> Tensor:
        """Return the gradient times ``scale``, as a new tensor without duplicates; without rows if it is missing."""
        (gradient,) = gradients
        if gradient is None:
            nowhere = torch.empty(1, 0, dtype=torch.int64, device=self.last.device)
            nothing = self.last.new_empty(0, *self.last.shape[1:])
            gradient = torch.sparse_coo_tensor(nowhere, nothing, self.last.shape, check_invariants=False)
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        self._message = (gradient.to(self.dtype).coalesce() * scale).coalesce()
        return self._message

    def spread(self, gradients: Sequence[Tensor | None]) -> None:
        """Replace the gradient by the average; one without rows is none, and a dense one (of tied weights) stays so."""
        averaged, (gradient,) = self._message.coalesce(), gradients
        if gradient is not None and not gradient.is_sparse:
            self.last.grad = averaged.to_dense()
        else:
            self.last.grad = averaged if averaged._nnz() else None
        self._message = torch.empty(0)


AnyBucket = Bucket | SparseBucket


def make_buckets(
    parameters: Sequence[Parameter],
    sparse: Iterable[Tensor],
    *,
    most: int,
    arrival: Mapping[int, int],
    summed: bool = False,
) -> list[AnyBucket]:
    """Join parameters to buckets of at most so many bytes, the last parameter first; a larger gradient goes alone.

    Buckets are the same on all ranks but for ``last``, which follows from ``arrival``: the place of each gradient in a
    backward pass, by the ``id`` of its parameter. If gradients are ``summed``, half-precision ones are sent in float32.
    Those of ``sparse`` parameters go alone.
    """
    dtype: Callable[[Parameter], torch.dtype] = dtype_of_sum if summed else attrgetter("dtype")
    alone = set(map(id, sparse))
    together = [parameter for parameter in reversed(parameters) if id(parameter) not in alone]
    dense = [
        Bucket(tuple(group), max(group, key=lambda p: arrival.get(id(p), -1)), dtype(group[0]))
        for group in _grouped(together, most, dtype)
    ]
    return [*dense, *(SparseBucket(parameter, dtype(parameter)) for parameter in parameters if id(parameter) in alone)]


def _copy(sources: list[Any], targets: list[Any]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _grouped(
    parameters: Iterable[Parameter], most: int, dtype: Callable[[Parameter], torch.dtype]
) -> list[list[Parameter]]:
    """Neighbours of one type and device, in groups of at most so many bytes."""
    full: list[list[Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for parameter in parameters:
        kind = dtype(parameter), parameter.device
        size = parameter.numel() * kind[0].itemsize
        if size > most:
            full.append([parameter])
            continue
        if sizes[kind] + size > most:
            full.append(filling.pop(kind))
            del sizes[kind]
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] += size
        if not full and sizes[kind] >= FIRST_BUCKET:
            full.append(filling.pop(kind))
            del sizes[kind]
    return [*full, *filling.values()]


class GradientReducer:
    """Averages the gradients of a ``DistributedDataParallel`` over ranks, window by window."""

    def __init__(self, module: Any) -> None:
        self._module, self._group = module, module.process_group
        self._arrival: dict[int, int] | None = None  # places of gradients in a backward pass; none before the first
        self._may_overlap = False
        self._made_for: tuple[bool, list[bool]] | None = None  # what the buckets hold; None: to be made anew
        self._buckets: list[AnyBucket] = []
        self._rooms: dict[torch.device, list[Tensor]] = {}  # where messages are written, by turns
        self.collectives = 0  # that it has run
        self.begin_epoch()
        self._bucketed(summed=True)

    def memory(self) -> Iterator[Tensor]:
        """Yield where gradients are copied, which is kept: sending them takes no memory in a backward pass."""
        return chain.from_iterable(self._rooms.values())

    def begin_epoch(self) -> None:
        """List the parameters anew, as the module does (``torch/nn/parallel/distributed.py:906``): some may be new."""
        named, ignored = self._module.module.named_parameters(), self._module.parameters_to_ignore
        self._parameters: list[Parameter] = [parameter for name, parameter in named if name not in ignored]
        self._made_for = None

    def window(self, *, summed: bool) -> "WindowReduction":
        """Begin the reduction of one window, whose gradients may be sums of several micro-batches; all ranks do so."""
        return WindowReduction(self._bucketed(summed=summed), self._send)

    def around_backward(
        self, trainer: Any, window: "WindowReduction | None", *, may_overlap: bool
    ) -> AbstractContextManager[None]:
        """Return a context in which backward passes average the gradients of a window, before ``on_after_backward``.

        They are sent while the pass runs if it ``may_overlap`` and an earlier pass has shown in which order they come.
        """
        if window is None and self._arrival is not None:
            return nullcontext()
        plugin = trainer.precision_plugin
        backward = plugin.backward

        def run(*arguments: Any, **settings: Any) -> None:
            learning = self._learning() if self._arrival is None else nullcontext()
            sends = window is not None and may_overlap and self._may_overlap
            with learning, window.overlapping() if window is not None and sends else nullcontext():
                backward(*arguments, **settings)
            if window is not None:
                window.finish()

        return patching.shadowed(plugin, "backward", run)

    def check(self) -> None:
        """Refuse gradients of parameters that were not trained when the reduction began: no rank sends them."""
        late = [one for one in self._frozen if one.requires_grad and one.grad is not None]
        if late:
            raise UserError(
                f"training_step sets requires_grad=True on {len(late)} parameters (the first is of shape "
                f"{tuple(late[0].shape)}), when ranks have agreed on the gradients that they exchange: set it in "
                "on_train_batch_start or before."
            )

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Return a context in which a first backward pass shows the order of gradients, and whether each comes once.

        Weights that several parts share get more than one with ``torch.utils.checkpoint`` and ``use_reentrant=True``.
        Fused kernels that write gradients by themselves may do so more than once, too.
        """
        before = Gradients.of(self._parameters)
        with counted_additions(self._parameters) as counts:
            yield
        if counts:
            changed = Gradients.of(self._parameters).changed_since(before)
            self._may_overlap = all(counts[p] == 1 for p, has_changed in zip(self._parameters, changed) if has_changed)
            self._arrival = {id(parameter): place for place, parameter in enumerate(counts)}
            self._made_for = None

    def _bucketed(self, *, summed: bool) -> list[AnyBucket]:
        """Return the buckets for the parameters that are trained now, with room to copy them."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if (summed, trained) != self._made_for:
            self._frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
            tables = (part for part in self._module.modules() if isinstance(part, (Embedding, EmbeddingBag)))
            self._buckets = make_buckets(
                [parameter for parameter in self._parameters if parameter.requires_grad],
                [table.weight for table in tables if table.sparse],  # as ``DistributedDataParallel`` takes them
                most=getattr(self._module, "bucket_bytes_cap", BUCKET),
                arrival=self._arrival or {},
                summed=summed,
            )
            self._make_room()
            self._made_for = summed, trained
        return self._buckets

    def _make_room(self) -> None:
        """Let each message lie where the last but one does, which has come back before it is written."""
        dense = [(place, bucket) for place, bucket in enumerate(self._buckets) if isinstance(bucket, Bucket)]
        for device in {bucket.last.device for _, bucket in dense}:
            size = max(bucket.size for _, bucket in dense if bucket.last.device == device)
            if device not in self._rooms or len(self._rooms[device][0]) < size:
                self._rooms.pop(device, None)  # freed before new ones are made
                self._rooms[device] = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
        for place, bucket in dense:
            bucket.place(self._rooms[bucket.last.device][place % IN_FLIGHT])

    def _send(self, bucket: AnyBucket, gradients: Sequence[Tensor | None]) -> Any:
        """Begin to average a copy of the gradients of a bucket; return what is to be waited for."""
        before = sequence_number(self._group)
        message = bucket.join(gradients, 1 / dist.get_world_size(self._group))
        work = dist.all_reduce(message, group=self._group, async_op=True)
        self.collectives += sequence_number(self._group) - before
        return work


class WindowReduction:
    """The reduction of the gradients of one window: ``send`` begins to average those of a bucket."""

    def __init__(self, buckets: Sequence[AnyBucket], send: Callable[[AnyBucket, Sequence[Tensor | None]], Any]) -> None:
        self._buckets, self._send = [*buckets], send
        self._waiting = deque(self._buckets)
        self._sent: deque[tuple[AnyBucket, Any]] = deque()  # with what is to be waited for
        self._final: dict[AnyBucket, Gradients] = {}  # as they were sent, or came back: no pass should add to them
        self._aside: list[tuple[Any, Any]] = []  # parameters, and averages of what a pass sent that failed
        self._lock = Lock()  # a model on several devices has several threads of backward passes

    @property
    def is_over(self) -> bool:
        """Whether all gradients are averages, and nothing is left to be checked."""
        return not (self._waiting or self._sent or self._final or self._aside)

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Return a context in which a backward pass sends each bucket as soon as the pass has added to all of it.

        If a pass before it has sent some and failed, nothing is sent: complete gradients lack those set aside.
        """
        if len(self._waiting) < len(self._buckets):
            yield
            return
        before = {bucket: Gradients.of(bucket.parameters) for bucket in self._buckets}
        came: set[Tensor] = set()  # parameters that are the last of a bucket

        def send_complete(last: Tensor) -> None:
            with self._lock, torch.no_grad():  # a pass that can be differentiated runs hooks with gradients enabled
                came.add(last)
                while self._waiting and self._waiting[0].last in came:
                    gradients = Gradients.of(self._waiting[0].parameters)
                    if not all(gradients.changed_since(before[self._waiting[0]])):
                        return
                    self._send_next(gradients)

        lasts: list[Any] = [bucket.last for bucket in self._buckets if bucket.last.requires_grad]  # frozen since
        hooks = [last.register_post_accumulate_grad_hook(send_complete) for last in lasts]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def set_aside(self) -> None:
        """After a pass that failed: keep the averages of what was sent, which stay right, while it runs again."""
        self._receive()
        self._final.clear()
        sent = self._buckets[: len(self._buckets) - len(self._waiting)]
        self._aside = self._aside or [(p, p.grad) for bucket in sent for p in bucket.parameters]
        for parameter, _ in self._aside:
            parameter.grad = None

    def finish(self) -> None:
        """Send what is left, as all passes are over, and wait for the averages; check that none was sent too early."""
        for parameter, averaged in self._aside:
            parameter.grad = averaged
        self._aside = []
        with torch.no_grad():
            while self._waiting:
                self._send_next(Gradients.of(self._waiting[0].parameters))
        self._receive()
        for bucket, gradients in self._final.items():
            _check(gradients, Gradients.of(bucket.parameters))
        self._final.clear()

    def _send_next(self, gradients: Gradients) -> None:
        self._receive(in_flight=IN_FLIGHT - 1)
        bucket = self._waiting[0]
        self._sent.append((bucket, self._send(bucket, gradients.tensors)))
        self._final[bucket] = gradients
        self._waiting.popleft()

    @torch.no_grad()
    def _receive(self, in_flight: int = 0) -> None:
        """Wait for averages, until no more buckets than these are on their way."""
        while len(self._sent) > in_flight:
            bucket, work = self._sent[0]
            work.wait()
            gradients = Gradients.of(bucket.parameters)
            _check(self._final.pop(bucket, gradients), gradients)
            bucket.spread(gradients.tensors)
            self._final[bucket] = Gradients.of(bucket.parameters)
            self._sent.popleft()


def _check(before: Gradients, now: Gradients) -> None:
    if not now.unchanged_since(before):
        raise UserError(
            "A backward pass added to a gradient once more after it had been sent to the other ranks, which the "
            "first pass of the training did not do: torch.utils.checkpoint needs use_reentrant=False here."
        )
