"""The gradients of a window: what each pass weighs, and what is done to them before the optimizer's step.

Sparse ones are coalesced, and half-precision ones summed in float32.

Tested in tests/integration/test_token_weights.py and tests/integration/test_half_parameters.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat import gradient_dtype, ranks
from lightning_ga.compat.logged_values import Counted
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import ExactnessWarning
from lightning_ga.plan.config import Normalize, Options
from lightning_ga.plan.item_counters import count_items
from lightning_ga.plan.window_weights import WindowWeights
from lightning_ga.plan.windows import Window
from lightning_ga.snapshot.copies import coalesce_gradients, scale_gradients, sparse_parameters

LEFT_OUT = (
    "training_step returned None for some micro-batches of a window and a loss for others: {meaning}. Return a loss "
    "for every micro-batch to train on all of them."
)
AS_MEAN = "the gradient is the mean over those with a loss"
AS_ZEROS = "the gradient is the sum of those with a loss, divided as if all had one"


class Gradients:
    """Weighs backward passes so that a window's gradient is that of its samples in one pass.

    Passes are weighted by their samples (``normalize="samples"``), by what a callable counts in them, or, with
    ``None``, by Lightning's division by the factor (pieces of a batch by their samples).
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer = trainer
        self.normalize: Normalize = options.normalize
        self._counter: Callable[[Any], Any] | None = self.normalize if callable(self.normalize) else None
        self._may_leave_out = options.on_oom == "skip"
        self.left_out: set[int] = set()  # indices of the window's passes that are left out: ``LeftOut`` fills it
        self.running: int | None = None  # index of the pass that runs; known if samples may be left out
        self.shapes = ""  # of the tensors of its batch
        self._world_size = ranks.data_ranks(trainer)[0]
        self.counted = Counted()  # in the loop's running batch so far
        self.weights = WindowWeights(self._world_size, partial(ranks.sum_over_ranks, trainer))
        self._weightless = ExitStack()  # undoes what makes a pass of weight 0 weigh nothing
        self._sparse: list[torch.nn.Parameter] | None = None  # parameters that may have sparse gradients, once known
        self._half: list[torch.Tensor] = []  # parameters whose gradients are summed in float32
        self._owes_rounding_warning = False  # whether a warning is due that torch rounds these sums
        self._passes = 0  # of the window, that have begun
        self._losses = 0  # of these passes, that have a loss
        self._has_warned = False

    def summed_in_float32(self) -> AbstractContextManager[None]:
        """Return a context in which half-precision gradients are summed in float32, and rounded before each step."""
        if not ranks.gradients_are_private(self._trainer):
            return nullcontext()
        half = gradient_dtype.half_parameters(self._trainer.lightning_module)
        if not gradient_dtype.has_grad_dtype():
            self._owes_rounding_warning = bool(half)
            return nullcontext()
        self._half = half
        return gradient_dtype.float32_allowed(half)

    def begin_window(self) -> None:
        """Begin a window, or begin it again after an error."""
        self.end_weightless_pass()
        self._passes = 0
        self._losses = 0

    @property
    def _factor(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    def weigh_micro_batch(
        self, batch: Any, window: Window, index_in_window: int, *, samples: int, is_stand_in: bool, may_drop: bool
    ) -> None:
        """Weigh the next pass, a micro-batch of a window that is planned.

        It has so many ``samples``, fewer than were planned if a collate function has dropped some (``may_drop``). A
        stand-in has none.
        """
        items = float(samples)
        if self._counter is not None and samples:
            items = count_items(self._counter, batch)
        self.counted = Counted(samples, items, samples)
        if self._counter is not None:
            self._weigh_late(items)
        elif self.normalize is None:
            self._weigh_share(0.0 if is_stand_in else 1.0, of=1.0)
        else:
            planned = window.sizes[index_in_window]
            count_may_differ = may_drop or self._may_leave_out
            self._weigh_known(items, planned=planned, window_samples=window.samples, count_may_differ=count_may_differ)
        if is_stand_in and self._world_size == 1:  # on several ranks its step runs, because it may exchange values
            # No parameter gets a gradient, as one that the others of the window do not use gets none.
            self._skip_step(torch.zeros((), device=self._trainer.lightning_module.device, requires_grad=True))
        self._leave_out(batch)

    def weigh_piece(self, piece: Any, batch: Any, *, samples: int, batch_samples: int) -> float:
        """Weigh the next pass, a piece that the step cuts from a batch; return its share in a mean over the batch."""
        count = float(samples)
        total = float(batch_samples)
        if self._counter is not None:
            count = count_items(self._counter, piece)
            total = count if piece is batch else count_items(self._counter, batch)
        self.counted = Counted(self.counted.samples + samples, self.counted.items + count, samples)
        is_whole_window = self._factor * self._world_size == 1  # over all ranks
        if self.normalize is None:  # as Lightning weighs batches
            self._weigh_share(count, of=total)
        elif is_whole_window and total > 0:
            self._weigh_known(count, planned=count, window_samples=total)
        elif is_whole_window and self._counter is None:  # 0 samples of 0 weigh 1, as in stock Lightning
            self._weigh_share(count, of=total)
        else:  # the total is known as the window ends; a counter that counts nothing in all of it is refused there
            self._weigh_late(count)
        self._leave_out(piece)
        return count / total if total else 0.0

    def _weigh_share(self, count: float, *, of: float) -> None:
        """Weigh the next pass by its share in a batch, ``count / of``; 0 of 0 weighs 1."""
        self.weights.weigh_share(count, of=of, first=self._begin_pass())

    def _weigh_known(
        self, count: float, *, planned: float, window_samples: float, count_may_differ: bool = False
    ) -> None:
        is_first = self._begin_pass()
        self.weights.weigh_known(
            count,
            planned=planned,
            window=window_samples,
            factor=self._factor,
            first=is_first,
            count_may_differ=count_may_differ,
        )

    def _weigh_late(self, count: float) -> None:
        is_first = self._begin_pass()
        may_be_empty = self._counter is None
        self.weights.weigh_late(count, factor=self._factor, first=is_first, may_be_empty=may_be_empty)

    def _begin_pass(self) -> bool:
        """Count a pass; return whether it is the window's first."""
        self._passes += 1
        return self._passes == 1

    def apply_weight(self, loss: torch.Tensor) -> None:
        """Multiply the backward pass that begins by its weight; at weight 0, make its gradients zero."""
        weight = self.weights.weight
        self._losses += 1
        self.weights.reach()
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
        if weight == 0.0:
            # A mean over nothing is NaN, and 0 × NaN too: gradients are made zero as they come, before ranks reduce.
            for parameter in self._trainer.lightning_module.parameters():
                if parameter.requires_grad:
                    self._weightless.callback(parameter.register_hook(torch.zeros_like).remove)

    def _leave_out(self, batch: Any) -> None:
        """Name the pass that begins; if its sample is left out, let it compute and weigh nothing."""
        if not self._may_leave_out:
            return
        self.running = self._passes - 1
        self.shapes = " ".join(str(tuple(tensor.shape)) for tensor in tensors_in(batch))
        if self.running in self.left_out:
            self.weights.leave_out()
            # All that is trained depends on the loss, as reducers of ranks expect.
            trained = [each for each in self._trainer.lightning_module.parameters() if each.requires_grad]
            self._skip_step(torch.stack([each.flatten()[:1].float().sum() for each in trained]).sum() * 0.0)

    def forget_pass(self) -> None:
        """Forget which pass ran last."""
        self.running = None

    def _skip_step(self, loss: torch.Tensor) -> None:
        """Let the step of the pass that begins return this loss."""
        module = self._trainer.lightning_module
        self._weightless.enter_context(shadowed(module, "training_step", lambda *_: loss))

    def settle(self) -> None:
        """After a backward pass, coalesce sparse gradients; widen half-precision ones if they will change later."""
        self.end_weightless_pass()
        if self._sparse is None:
            self._sparse = sparse_parameters(self._trainer.lightning_module)
        if self._sparse:
            coalesce_gradients(self._sparse)
        weighs_all = self.weights.weight == 1.0  # a first piece of several weighs less
        is_whole_window = self._factor == 1 and self._passes == 1 and weighs_all
        if is_whole_window:
            return
        if self._half:
            gradient_dtype.widen(self._half)
        if self._owes_rounding_warning:
            self._owes_rounding_warning = False
            rank_zero_warn(gradient_dtype.SUMS_ARE_ROUNDED, category=ExactnessWarning)

    def close_window(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the gradients to the mean over the window, after the GradScaler's unscaling and before clipping."""
        scale = self.weights.close()
        if scale != 1.0:
            scale_gradients(optimizer, scale)
        gradient_dtype.narrow(self._half)
        if 0 < self._losses < self._passes and not self._has_warned:
            self._has_warned = True
            meaning = AS_ZEROS if self.normalize is None else AS_MEAN
            rank_zero_warn(LEFT_OUT.format(meaning=meaning), category=ExactnessWarning)
        self.begin_window()  # LBFGS and SAM evaluate it again

    def end_weightless_pass(self) -> None:
        """Let the module's own step run, and gradients come as they are, again after a pass that weighs nothing."""
        self._weightless.close()
