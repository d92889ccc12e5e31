"""Average the gradients of a window over ranks, while its last backward pass runs.

``DistributedDataParallel`` does that too, but its reducer cannot go on where a pass was broken off: a rank that runs
the pass again, in pieces, would issue other collectives than the rest and hang them all. So every pass runs without
it. Here all ranks send buckets of gradients in the same order, each as soon as its gradients are complete. What is
sent is a copy. Of a pass that fails, complete gradients are kept and pieces add nothing to them, so what was sent
stays right; buckets that are left are sent once the pieces have run.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_ga.compat.buckets import AnyBucket, Bucket, Gradients, Message, make_buckets
from lightning_ga.compat.collectives import sequence_number
from lightning_ga.compat.gradient_dtype import dtype_of_sum
from lightning_ga.errors import UserError

BUCKET = 25 * 2**20  # bytes, as in DistributedDataParallel
IN_FLIGHT = 2  # buckets of which copies are kept: one is sent while the next is made


class GradientReducer:
    """Averages gradients over ranks, window by window.

    Args:
        parameters: Lists what is averaged: the same on every rank, in the same order.
        sparse: Lists parameters whose gradients are sparse.
        group: The process group.
        most: Bytes of a bucket.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Parameter]],
        sparse: Callable[[], Iterable[Tensor]] = tuple,
        *,
        group: Any,
        most: int = BUCKET,
    ) -> None:
        self._list, self._list_sparse, self._group, self._most = parameters, sparse, group, most
        self._arrival: dict[int, int] = {}
        self._made_for: tuple[bool, list[bool]] | None = None  # what the buckets hold; None: to be made anew
        self._buckets: list[AnyBucket] = []
        self.collectives = 0  # that it has run
        self._rooms: dict[torch.device, list[Tensor]] = {}  # where messages are written, by turns
        self._messages: dict[Bucket, Message] = {}
        self.begin_epoch()
        self._bucketed(summed=True)

    def memory(self) -> Iterator[Tensor]:
        """Yield where gradients are copied, which is kept: sending them takes no memory in a backward pass."""
        return chain.from_iterable(self._rooms.values())

    def begin_epoch(self) -> None:
        """List the parameters anew: some may have been added."""
        self._parameters, self._made_for = self._list(), None

    def expect(self, order: Iterable[Tensor]) -> None:
        """Say in which order gradients come in a backward pass, as far as that is known."""
        self._arrival, self._made_for = {id(parameter): place for place, parameter in enumerate(order)}, None

    def window(self, *, summed: bool) -> "WindowReduction":
        """Begin the reduction of one window; all ranks do so in the same order.

        Args:
            summed: Whether gradients are sums over several micro-batches, those of half-precision parameters in
                float32. They are of one type on all ranks, some of which may run a micro-batch in pieces, or none.
        """
        return WindowReduction(self._bucketed(summed=summed), partial(self._send, 1 / dist.get_world_size(self._group)))

    def check(self) -> None:
        """Refuse gradients of parameters that were not trained when the window's reduction began: no bucket holds them.

        Raises:
            UserError: If there are some; ranks would go on with different weights.
        """
        late = [one for one in self._frozen if one.requires_grad and one.grad is not None]
        if late:
            raise UserError(
                f"training_step sets requires_grad=True on {len(late)} parameters (the first is of shape "
                f"{tuple(late[0].shape)}), when ranks have agreed on the gradients that they exchange: set it in "
                "on_train_batch_start or before."
            )

    def _bucketed(self, *, summed: bool) -> list[AnyBucket]:
        """Return the buckets for the parameters that are trained now, with room to copy them."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if (summed, trained) != self._made_for:
            wanted = [parameter for parameter, trains in zip(self._parameters, trained) if trains]
            self._frozen = [parameter for parameter, trains in zip(self._parameters, trained) if not trains]
            dtype = dtype_of_sum if summed else attrgetter("dtype")
            settings: dict[str, Any] = {"most": self._most, "arrival": self._arrival, "dtype": dtype}
            self._buckets = make_buckets(wanted, self._list_sparse(), **settings)
            self._make_room()
            self._made_for = summed, trained
        return self._buckets

    def _make_room(self) -> None:
        """Let each message lie where the last but one does, which has come back before it is written."""
        self._messages = {}
        dense = [(place, bucket) for place, bucket in enumerate(self._buckets) if isinstance(bucket, Bucket)]
        for device in {bucket.last.device for _, bucket in dense}:
            size = max(bucket.size for _, bucket in dense if bucket.last.device == device)
            rooms = self._rooms.setdefault(device, [])
            if not rooms or len(rooms[0]) < size:
                rooms.clear()
                rooms += [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
        self._messages = {
            bucket: bucket.message(self._rooms[bucket.last.device][place % IN_FLIGHT]) for place, bucket in dense
        }

    def _send(self, scale: float, bucket: AnyBucket, gradients: Gradients) -> "Sent":
        """Begin to average a copy of the gradients of a bucket."""
        before = sequence_number(self._group)
        spread: Callable[[Sequence[Tensor | None]], None]
        if isinstance(bucket, Bucket):
            message = self._messages[bucket]
            bucket.join(gradients.tensors, scale, message)
            whole, spread = message.whole, partial(bucket.spread, averaged=message)
        else:
            whole = bucket.joined(gradients.tensors[0], scale)
            spread = partial(bucket.spread, averaged=whole)
        work = dist.all_reduce(whole, group=self._group, async_op=True)
        self.collectives += sequence_number(self._group) - before
        return Sent(bucket, work, spread)


@dataclass(frozen=True, slots=True)
class Sent:
    """A bucket on its way."""

    bucket: AnyBucket
    work: Any  # what is to be waited for
    spread: Callable[[Sequence[Tensor | None]], None]  # replaces gradients by averages, once they are there


class WindowReduction:
    """The reduction of the gradients of one window.

    Args:
        buckets: What is sent, in this order.
        send: Begins to average the gradients of a bucket.
    """

    def __init__(self, buckets: Iterable[AnyBucket], send: Callable[[AnyBucket, Gradients], Sent]) -> None:
        self._buckets, self._send = [*buckets], send
        self._waiting, self._sent = deque(self._buckets), deque[Sent]()
        self._averaged: list[tuple[Any, Any]] = []  # of what was sent by a pass that failed
        self._marks: dict[AnyBucket, Gradients] = {}  # that the pass sent, and should add to no more
        self.has_sent = False  # so that complete gradients have to be kept
        self._lock = Lock()  # a model on several devices has several threads of backward passes

    @contextmanager
    def overlapping(self, are_complete: Callable[[Sequence[Parameter], Sequence[int]], bool]) -> Iterator[None]:
        """Return a context in which a backward pass sends each bucket as soon as its gradients are complete.

        ``are_complete`` says whether those of parameters are, by their versions.
        """
        came: set[int] = set()  # gradients that are the last of a bucket

        def send_complete(last: Tensor) -> None:
            # A backward pass that can be differentiated itself runs hooks with gradients enabled.
            with self._lock, torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                came.add(id(last))
                while self._waiting and id(self._waiting[0].last) in came:
                    bucket = self._waiting[0]
                    gradients = Gradients.of(bucket.parameters)
                    if not are_complete(bucket.parameters, gradients.versions):
                        return
                    self._send_next(gradients, watched=True)

        lasts: list[Any] = [bucket.last for bucket in self._waiting if bucket.last.requires_grad]  # frozen since
        hooks = [last.register_post_accumulate_grad_hook(send_complete) for last in lasts]
        try:
            yield
        finally:
            self._marks = {}
            for hook in hooks:
                hook.remove()

    @property
    def waiting(self) -> list[AnyBucket]:
        """Buckets that were not sent yet."""
        return [*self._waiting]

    def set_aside(self) -> None:
        """After a pass that failed: keep the averages of what was sent, which stay right, while it runs again."""
        self.receive()
        waiting = set(map(id, self._waiting))
        sent = [p for bucket in self._buckets if id(bucket) not in waiting for p in bucket.parameters]
        self._averaged = self._averaged or [(parameter, parameter.grad) for parameter in sent]
        for parameter, _ in self._averaged:
            parameter.grad = None

    @property
    def is_over(self) -> bool:
        """Whether all gradients are averages, and nothing is left to be checked."""
        return not (self._waiting or self._sent or self._marks)

    def finish(self) -> None:
        """Send what is left, as all passes are over, and wait for the averages; to be called again if it fails.

        Raises:
            UserError: If the pass added to a gradient that it had sent.
        """
        for parameter, averaged in self._averaged:
            parameter.grad = averaged
        self._averaged = []
        with torch.no_grad():
            while self._waiting:
                self._send_next(Gradients.of(self._waiting[0].parameters))
        self.receive()
        for bucket, marked in self._marks.items():
            _check(marked, Gradients.of(bucket.parameters))
        self._marks = {}

    def receive(self) -> None:
        """Wait for all that was sent."""
        with torch.no_grad():
            while self._sent:
                self._receive_next()

    def _send_next(self, gradients: Gradients, *, watched: bool = False) -> None:
        """Send the next bucket; ``watched`` in a pass that should not add to it any more."""
        while len(self._sent) >= IN_FLIGHT:
            received = self._receive_next()
            if watched:
                self._marks[received] = Gradients.of(received.parameters)
        bucket = self._waiting[0]
        self._sent.append(self._send(bucket, gradients))
        self.has_sent = True
        self._waiting.popleft()
        if watched:
            self._marks[bucket] = gradients

    def _receive_next(self) -> AnyBucket:
        sent = self._sent[0]
        sent.work.wait()
        gradients = Gradients.of(sent.bucket.parameters)
        _check(self._marks.pop(sent.bucket, gradients), gradients)
        sent.spread(gradients.tensors)
        self._sent.popleft()
        return sent.bucket


def _check(before: Gradients, now: Gradients) -> None:
    if not now.unchanged_since(before):
        raise UserError(
            "A backward pass added to a gradient once more after it had been sent to the other ranks, which the "
            "first pass of the training did not do: torch.utils.checkpoint needs use_reentrant=False here."
        )
