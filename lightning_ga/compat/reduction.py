"""Let ``DistributedDataParallel`` exchange the gradients of a window, and survive an error while it does.

Passes before the window's last run under ``no_sync``. In the last one DDP's own reducer sends buckets of gradients
while the backward pass runs, through a process group that notes them. If that pass fails, the rank waits for these
averages, keeps them because they stay right, and resets its reducer. When the window runs again, its last pass reads
them and sends the other buckets, for which the other ranks wait (``c10d/reducer.cpp`` of torch 2.15).

A reducer sees in the first exchange in which order gradients come. As the second begins, ranks agree on buckets in that
order. A reset reducer has forgotten the order. So a rank that fails

- before a window has gone through: resets it, and sees the order as the window runs again;
- later, but not while it sends: leaves it alone;
- while it sends, in agreed buckets: resets it now, and after each exchange from here on, because it would see an order
  again, and agree on buckets alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn import Embedding, EmbeddingBag

from lightning_ga.compat import patching, ranks
from lightning_ga.compat.gradient_dtype import dtype_of_sum, half_parameters, has_grad_dtype
from lightning_ga.errors import RankError

STEP_EXCHANGES_VALUES = (
    "A rank that has run out of memory runs a window again alone, but the step exchanges values with the other ranks "
    "(all_gather, all_reduce, a metric with dist_sync_on_step): resume from the last checkpoint with a lower "
    "max_micro_batch_size or memory_budget."
)
ALREADY_SENT = "ranks were exchanging gradients by a communication hook of their own, or after the window's last pass"
# Keeps each module's ``_Noting`` alive as long as the module: the reducer holds only the C++ half.
_IN_USE: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


class Stage(Enum):
    """How far the exchange of a window's gradients is."""

    PASSES = "passes run without it"
    SENDING = "gradients may be on their way"
    DUE = "``finish`` has to average them"
    DONE = "ranks have the same gradients"


class Exchange:
    """The exchange of gradients over ranks, window by window; ``refusal`` says why no error can be survived."""

    def __init__(
        self,
        module: Any,
        refusal: str | None = None,
        plugin: Any = None,
        before_sending: Callable[[], object] = patching.nothing,
    ) -> None:
        self.refusal = refusal
        self._module = module
        self._plugin = plugin
        self._before_sending = before_sending
        self._noting = _Noting(module.process_group, before_sending)
        is_wide = has_grad_dtype() and bool(half_parameters(module)) and not module._comm_hooks
        # Averaged after the window's last pass: sums in float32; and with ``static_graph``, which would exchange in the
        # first pass in spite of ``no_sync``.
        self.by_hand = refusal is None and (module.static_graph or is_wide)
        self._stage = Stage.PASSES
        self._repeats = False  # whether the window runs again
        self._is_ordered = False  # whether an earlier window has shown in which order gradients come
        self._has_lost_order = False  # whether the reducer was reset after ranks had agreed on buckets
        embeddings = [part for part in module.modules() if isinstance(part, Embedding | EmbeddingBag)]
        # Weights of embeddings with sparse gradients.
        self._sparse: set[Tensor] = {each.weight for each in embeddings if each.sparse and each.weight.requires_grad}

    @property
    def _is_noted(self) -> bool:
        """Whether what is sent is noted, so that it can be kept."""
        return not (self.by_hand or self.refusal or self._module._comm_hooks)

    def begin_window(self) -> None:
        """Share buffers before the savepoint is taken; a window that runs again has them already."""
        module = self._module
        if not self._repeats:
            if self.by_hand:
                module._static_graph_delay_allreduce_enqueued = True
            elif self.refusal is None:
                module.reducer._update_process_group(self._noting)
                _IN_USE[module] = self._noting
            if self._stage is Stage.DONE:  # the window before has gone through
                self._is_ordered = True
            self._stage = Stage.PASSES
            self._noting.begin()  # an error before the exchange is to wait for nothing of the window before
            ranks.share_buffers_before_forward(module)
        module.require_forward_param_sync = False  # a failed last pass has set it, and a rank alone must not share

    @contextmanager
    def pass_(self, *, last: bool) -> Iterator[None]:
        """Return a context for a forward and backward pass; the window's ``last`` exchanges gradients."""
        sends = last and not self.by_hand
        if sends:
            self._stage = Stage.SENDING
            self._noting.begin(keeps=self._repeats)
        elif last:
            self._stage = Stage.DUE
        repeats = self._repeats  # ``finish`` forgets it
        begun = ranks.collectives_run()
        with ExitStack() as stack:
            if not sends:
                stack.enter_context(self._module.no_sync())
            elif not self._is_noted:
                stack.enter_context(ranks.uncounted_collectives())
            for weight in self._sparse:  # DDP divides sparse gradients in place, which share memory with others
                stack.callback(weight.register_hook(torch.clone).remove)  # type: ignore[no-untyped-call]
            # Before ``on_after_backward``. When the window ends, ``finish`` is called again, and finds it done.
            if last and self.by_hand and self._plugin is not None:
                run = partial(self._then_finish, self._plugin.backward)
                stack.enter_context(patching.shadowed(self._plugin, "backward", run))
            yield
        if repeats and ranks.collectives_run() != begun:
            raise RankError(STEP_EXCHANGES_VALUES)
        if not sends:
            return
        if self._has_lost_order:
            self._module.reducer._reset_state()
        has_sent = self._noting.count > 0 or not self._is_noted  # a pass without a loss sends nothing
        self._stage = Stage.DONE if has_sent else Stage.PASSES

    def failed(self) -> str | None:
        """Prepare a failed window to run again; return why that is not possible, ``None`` if it is.

        The failed pass has been released. If gradients are on their way, this waits for other ranks.
        """
        module = self._module
        was_sending = self._stage is Stage.SENDING
        if self.refusal is not None:
            return self.refusal
        if (was_sending or self._stage is Stage.DONE) and not self._is_noted:
            return ALREADY_SENT
        self._stage = Stage.PASSES
        self._repeats = True
        self._noting.keep()
        if was_sending and self._noting.buckets_agreed:
            self._has_lost_order = True  # also resets it after each exchange from here on
        must_see_order = self._has_lost_order or not self._is_ordered  # else the reducer is left alone
        may_have_sent = self._is_noted  # by hand or through a hook, an error while gradients are sent was refused above
        if module.find_unused_parameters or (may_have_sent and must_see_order):  # a reset also forgets what was used
            module.reducer._reset_state()
        return None

    @torch.no_grad()
    def finish(self) -> None:
        """End a window, after its last backward pass or without one; average its gradients if that is done by hand."""
        self._repeats = False
        if self._stage is Stage.DUE:
            self._stage = Stage.SENDING
            self._before_sending()
            with ranks.uncounted_collectives():
                self._average()
            self._stage = Stage.DONE
            self._module.require_forward_param_sync = True  # as after the reducer's own exchange

    def _then_finish(self, backward: Any, *arguments: Any, **settings: Any) -> None:
        backward(*arguments, **settings)
        self.finish()

    def _average(self) -> None:
        """Average all gradients; a gradient that no rank has stays missing."""
        module = self._module
        group = module.process_group
        kinds = defaultdict(list)
        for parameter in module._module_parameters:
            if parameter in self._sparse:
                _average_sparse(parameter, group)
            elif parameter.requires_grad:
                kinds[dtype_of_sum(parameter), parameter.device].append(parameter)
        for (dtype, device), members in kinds.items():
            there = torch.tensor([p.grad is not None for p in members], dtype=dtype, device=device)
            averages = [torch.zeros_like(p, dtype=dtype) if p.grad is None else p.grad.to(dtype) for p in members]
            torch._foreach_mul_(averages, 1 / group.size())
            group.allreduce_coalesced([*averages, there]).wait()
            for parameter, average, is_there in zip(members, averages, there.tolist()):
                parameter.grad = average if is_there else None


def _average_sparse(parameter: Tensor, group: Any) -> None:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter).to_sparse(1)
    average = (gradient.to(dtype_of_sum(parameter)).coalesce() / group.size()).coalesce()
    group.allreduce([average]).wait()
    parameter.grad = average.coalesce() if average._nnz() else None


class _Noting(ProcessGroup):
    """The process group of a reducer: notes what is sent, and returns kept averages instead of sending again."""

    def __init__(self, group: Any, before_sending: Callable[[], object]) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._before_sending = before_sending
        self._sent: list[tuple[int, Tensor, Any]] = []  # places in the exchange, and what is to be waited for
        self._kept: dict[int, Tensor] = {}  # on the host: averages that came before the window failed
        self.count = 0  # messages of the exchange
        self.buckets_agreed = False  # whether ranks have agreed on the order of buckets

    def begin(self, *, keeps: bool = False) -> None:
        """Begin an exchange; if it ``keeps`` the averages that have arrived before, these are not sent again."""
        self._sent = []
        if not keeps:
            self._kept = {}
        self.count = 0

    def keep(self) -> None:
        """Wait for the averages of what was sent, and keep them, also if the exchange was cut off half-way."""
        for place, tensor, work in self._sent:
            work.wait()
            self._kept[place] = tensor.to("cpu", copy=True)
        self._sent = []

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        """Send a bucket, or the map of used parameters, which follows the last one."""
        self._before_sending()
        place = self.count
        self.count += 1
        if place in self._kept:
            done: Future[list[Tensor]] = Future()
            done.set_result([tensors[0].copy_(self._kept[place])])
            return _create_work_from_future(done)
        with ranks.uncounted_collectives():
            work = self._group.allreduce(tensors, options)
        self._sent.append((place, tensors[0], work))
        return work

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        """Send the order of buckets, as rank 0 has it."""
        self.buckets_agreed = True
        with ranks.uncounted_collectives():
            return self._group.broadcast(tensors, options)
