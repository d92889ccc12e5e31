"""The closures of automatic optimization, run whole or in pieces."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.compat import closures, loops, ranks
from lightning_ga.compat.reduction import GradientReducer, WindowReduction
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.batch_task import BatchResult, BatchTask, TrainingBatches
from lightning_ga.fit.lbfgs import evaluates_again
from lightning_ga.fit.oom_retry import OomRetrier
from lightning_ga.fit.pieces import Piece
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.plan.window_weights import WindowWeights
from lightning_ga.snapshot.gradients import Accumulations, GradientSnapshot, WindowGradientMarks, left_alone, set_apart


class MicroBatchClosures:
    """Gives the loop closures that run a micro-batch whole or in pieces.

    Args:
        trainer: The Trainer.
        retrier: Runs batches in pieces.
        gradients: The weights of the window.
        batches: What is known of the micro-batches.
        reducer: Averages gradients over ranks, where that is done by hand.
    """

    def __init__(
        self,
        trainer: Any,
        retrier: OomRetrier,
        gradients: WindowGradients,
        batches: TrainingBatches,
        reducer: GradientReducer | None,
    ) -> None:
        self.trainer, self.retrier, self.gradients = trainer, retrier, gradients
        self.batches, self._reducer = batches, reducer
        self.evaluates_again = evaluates_again(trainer.optimizers[0])
        self._warned = False
        self._trained = closures.TrainedTensors(trainer)
        self.parameters = self._trained.now()  # what may have a gradient, as of the window's start
        self.repeated: list[Tensor] | None = None  # that passes add to more than once; none before the first pass
        self.zeroes_anew = closures.zeroes_as_stock(trainer)  # so that a retry begins without gradients
        self.marks = WindowGradientMarks()

    @property
    def overlaps(self) -> bool:
        """Whether gradients may be sent while a backward pass runs: only then is it known what it adds to once.

        Not so where ranks wait for each other in it, as the order of what they do has to stay the same.
        """
        return self.repeated is not None and not self.retrier.attempts.waits_for_others("training")

    def closure(self, whole: Any, make: Callable[..., Any], *given: Any) -> Callable[..., Any]:
        """Return what runs one micro-batch; see ``closures.intercepted_closures``."""
        return MicroBatch(self, whole, make, *given).run

    def warn_of_second_evaluation(self) -> None:
        """Warn once where an optimizer (SAM, say) evaluates a closure again that holds a part of the window."""
        if self._warned or self.evaluates_again or self.trainer.accumulate_grad_batches == 1:
            return
        self._warned = True
        name = type(self.trainer.optimizers[0]).__name__
        rank_zero_warn(
            f"Accumulation is not exact: {name} evaluates its closure more than once a step, which holds only the last "
            'micro-batch of the window. Use micro_batching="step" with accumulate_grad_batches=1, which make a window '
            "of one batch.",
            category=ExactnessWarning,
        )

    def run(self, micro_batch: "MicroBatch") -> BatchResult:
        """Run the passes of one micro-batch."""
        done, reduction = self.retrier.run(micro_batch), micro_batch.reduction
        if reduction is not None and self._reducer is not None:
            if not reduction.is_over:  # no backward pass has done it
                self.retrier.attempts.again_if_memory_runs_out(reduction.finish)
            self._reducer.check()
            ranks.share_buffers(ranks.distributed_module(self.trainer))
        if micro_batch.withheld is not None and done.results[-1] is None:  # no pass of the last piece called them
            closures.call_after_backward(self.trainer, micro_batch.withheld)
        return done

    def reduction(self) -> WindowReduction | None:
        """Begin to average the gradients of a window, if the next micro-batch is its last and that is done by hand."""
        if self._reducer is None or not loops.window_is_over(self.trainer):
            return None
        return self._reducer.window(summed=self.trainer.accumulate_grad_batches > 1)

    def begin_epoch(self) -> None:
        """Look through the module again: parts may have been added."""
        self._trained = closures.TrainedTensors(self.trainer)
        self.zeroes_anew = closures.zeroes_as_stock(self.trainer)
        if self._reducer is not None:
            self._reducer.begin_epoch()

    def begin_window(self) -> None:
        """Look for what may have a gradient."""
        self.marks.forget()
        self.parameters = self._trained.now()

    def accumulations(self) -> Accumulations | None:
        """Return what counts the accumulations of the first pass that goes through."""
        return Accumulations(self.parameters) if self.repeated is None else None

    def new_gradients(self) -> bool:
        """Return whether tensors have a gradient that were not there when the window started."""
        known = set(map(id, self.parameters))
        now = closures.TrainedTensors(self.trainer).now()
        return any(tensor.grad is not None for tensor in now if id(tensor) not in known)

    def went_through(self, counted: Accumulations | None, *, completes: bool) -> None:
        """Learn from the first pass which parameters are added to more than once, and in which order.

        No gradients are held after the last pass of a window, which ``completes`` a micro-batch.
        """
        if counted is not None:
            self.repeated = counted.repeated()
            if self._reducer is not None:
                self._reducer.expect(counted.order())
        if completes and loops.window_is_over(self.trainer):
            self.marks.forget()


class MicroBatch(BatchTask):
    """Forward, zeroing of gradients and backward of one micro-batch, in one pass or in several.

    Args:
        steps: What all micro-batches share.
        whole: Lightning's closure of the whole micro-batch, for one pass.
        make: Makes further ones of the arguments that follow.
        kwargs: What the step gets, with the ``batch``.
        optimizer: The optimizer.
        batch_idx: The number of the micro-batch.
    """

    def __init__(
        self,
        steps: MicroBatchClosures,
        whole: Any,
        make: Callable[..., Any],
        kwargs: Any,
        optimizer: Optimizer,
        batch_idx: int,
    ) -> None:
        super().__init__(kwargs["batch"], "training")
        self.steps, self._prepared, self._make = steps, whole, make
        self._given = kwargs, optimizer, batch_idx
        self.is_first = batch_idx == 0
        self._number = batch_idx
        self._move = steps.retrier.move_of_pieces
        self._starts_window = closures.zeroes_gradients(whole)
        self._weights = steps.gradients.weights  # before any of it has run
        self._evaluated = False
        self.reduction: WindowReduction | None = None
        self.zeroed = False  # whether gradients are
        self._hooks_undone = False  # whether what else hooks around that changed was undone with a failed pass
        self._complete: dict[Piece | None, list[Tensor]] = {}  # gradients that a failed piece left complete
        self.withheld: Tensor | None = None  # loss of a piece after which no hooks were called, as more follow

    def run(self, *_: Any) -> Any:
        """Run the micro-batch; its result, Lightning's own where it ran whole."""
        steps = self.steps
        if self._evaluated:
            steps.warn_of_second_evaluation()
            steps.retrier.move_pieces(self._move)
        # The optimizer may have changed weights since the last pass.
        anew = self._evaluated or steps.evaluates_again or loops.begins_window(steps.trainer)
        self._evaluated, self.within_window = True, not anew
        self._complete, self.withheld, self.reduction = {}, None, steps.reduction()
        self.may_begin_again = self._starts_window and steps.zeroes_anew and self.reduction is None
        self.zeroed = self._hooks_undone = False
        self._weights = steps.gradients.weights
        done = steps.run(self)
        merge = steps.retrier.attempts.again_if_memory_runs_out
        return merge(lambda: _merged(done)) if done.sizes else done.results[0]

    @property
    def expected(self) -> int | None:
        """Samples that it should hold, where that is known."""
        return self.steps.batches.samples(self._number)

    def again(self) -> CollatedAgain | None:
        """Fetch its samples again; ``None`` where they are not at hand."""
        return self.steps.batches.samples_again(self._number)

    def attempt(self, piece: Piece | None, *, from_start: bool) -> "_Pass":
        """Return a pass over the whole micro-batch or a piece of it."""
        return _Pass(self, piece, from_start=from_start)

    def weigh(self, part: Any, piece: Piece) -> float:
        """Return what a piece weighs in the micro-batch."""
        return self.steps.gradients.share_of(part, self.batch, samples=piece.samples, whole=piece.of)

    def closure(self, part: Any) -> Any:
        """Return Lightning's closure for a part; it zeroes gradients until they are known to be."""
        closure, self._prepared = self._prepared, None
        if closure is None or part is not self.batch:
            kwargs, *others = self._given
            closure = self._make(kwargs if part is self.batch else {**kwargs, "batch": part}, *others)
        if self.zeroed and self._hooks_undone:
            closures.zero_through(closure, self._zero_apart)
        elif self.zeroed:
            closures.zero_no_gradients(closure)
        return closure

    def have_zeroed(self, *, hooks_undone: bool = False) -> None:
        """Note that gradients were zeroed if they had to be, and are kept from here on."""
        self.zeroed, self._hooks_undone = True, hooks_undone

    def have_undone(self, *, zeroing: bool) -> None:
        """Note that a pass was undone but for its gradients, and whether these were zeroed in it."""
        self.have_zeroed(hooks_undone=zeroing or self._hooks_undone)

    def _zero_apart(self, zero: Callable[[], None]) -> None:
        """Let hooks around the zeroing of gradients run again (a teacher follows there), without their gradients."""
        with set_apart(self.steps.parameters):
            zero()

    def begin_again(self) -> str | None:
        """Undo all passes: gradients are zeroed anew; name those that are not."""
        self.steps.gradients.put_back(self._weights)
        self.zeroed, self._hooks_undone, self.withheld = False, False, None
        zeroes_anew = closures.zeroes_as_stock(self.steps.trainer)  # parameters may have been unfrozen since
        return None if zeroes_anew else "gradients that came to be within an epoch, which no optimizer zeroes"

    def withhold_hooks(self, loss: Tensor) -> None:
        """Do what is ours after a backward pass; hooks of others wait until the gradients of the batch are complete."""
        self.withheld = loss
        self.steps.gradients.settle()

    def failed(self, piece: Piece | None, complete: list[Tensor]) -> None:
        """Note which gradients hold all that a failed piece adds."""
        self._complete[piece] = complete

    def complete_for(self, piece: Piece | None) -> list[Tensor]:
        """Return parameters whose gradients hold what a piece would add: it is part of one that failed."""
        if not self._complete:
            return []
        around = [failed for failed in self._complete if failed is None or (piece and failed.contains(piece))]
        return list({id(p): p for failed in around for p in self._complete[failed]}.values())


class _Pass:
    """One forward and backward pass over some samples."""

    def __init__(self, batch: MicroBatch, piece: Piece | None, *, from_start: bool) -> None:
        self._batch, self._piece, self._from_start = batch, piece, from_start
        self._weights: WindowWeights | None = None  # as they were; none where samples did not reach the device
        self._gradients: GradientSnapshot | None = None  # as they were; none where they are zeroed anew after an error
        completes = piece is None or piece.is_last
        self._reduction = batch.reduction if completes else None
        self._starts_window = False
        self._before_zeroing: GradientSnapshot | None = None  # while they are zeroed in a way of the user's own

    def __call__(self, part: Any) -> Any:
        """Run it; Lightning's result, of a piece what ``training_step`` returned, the loss without its graph."""
        batch, steps = self._batch, self._batch.steps
        closure = batch.closure(part)
        self._starts_window = closures.zeroes_gradients(closure) and not batch.zeroed
        self._weights = steps.gradients.weights
        if self._starts_window:
            steps.begin_window()
            if self._reduction is not None or not steps.zeroes_anew:
                closures.zero_through(closure, self._zero)
        elif not self._from_start:
            self._take_gradients()
        counted, piece = steps.accumulations(), self._piece
        if piece is not None:
            steps.gradients.weigh_a_part(batch.weigh(part, piece))
        contexts = [*self._contexts(), *([] if counted is None else [counted.counted()])]
        if contexts:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                result = closure.closure()
        else:
            result = closure.closure()
        completes = piece is None or piece.is_last
        if completes:
            steps.gradients.weigh_all()
        steps.went_through(counted, completes=completes)
        batch.have_zeroed()
        if piece is None:
            return result
        return None if result.loss is None else result.asdict()

    def undo(self) -> str | None:
        """Undo a pass that failed: gradients it touched are complete, unless they are zeroed anew.

        Returns:
            What cannot be undone, in words.
        """
        batch, steps, reduction = self._batch, self._batch.steps, self._reduction
        closures.undo_half_made_scale(steps.trainer)
        if self._from_start:
            return batch.begin_again()
        if self._weights is not None:
            steps.gradients.put_back(self._weights)
        if self._before_zeroing is not None and self._before_zeroing.restore():
            return "gradients in part, in a way of its own to zero them"
        has_sent = reduction is not None and reduction.has_sent
        if self._gradients is None or (self._starts_window and steps.zeroes_anew and not has_sent):
            return None
        is_closing = reduction is not None and reduction.is_closing
        batch.failed(self._piece, steps.parameters if is_closing else self._gradients.restore())
        batch.have_undone(zeroing=self._starts_window)
        lost = self._gradients.lost()
        if reduction is not None:
            reduction.receive()
        return "gradients of parameters that were made within an epoch" if steps.new_gradients() else lost

    def _zero(self, zero: Callable[[], None]) -> None:
        """Zero gradients, once where that may not leave none: the backward pass adds to what is left."""
        steps = self._batch.steps
        if not steps.zeroes_anew:
            self._before_zeroing = GradientSnapshot(steps.parameters)
        zero()
        self._before_zeroing = None
        if not steps.zeroes_anew:
            self._batch.have_zeroed()
        self._take_gradients()

    def _take_gradients(self) -> None:
        """Mark the gradients that the backward pass adds to."""
        steps = self._batch.steps
        self._gradients = steps.marks.take(steps.parameters, steps.repeated or ())

    def _are_complete(self, parameters: Sequence[Tensor], versions: Sequence[int]) -> bool:
        """Return whether the backward pass has been through with these, by the versions of their gradients."""
        return self._gradients is not None and self._gradients.are_complete(parameters, versions)

    def _contexts(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield contexts in which the backward pass leaves out what is complete, and reduces if it should."""
        steps, piece, reduction = self._batch.steps, self._piece, self._reduction
        complete = self._batch.complete_for(piece)
        if piece is not None and not piece.is_last:
            yield closures.before_the_last(steps.trainer, self._batch.withhold_hooks)
        if self._batch.reduction is not None or (piece is not None and not piece.is_last):  # else Lightning sees to it
            apart = closures.accumulating(steps.trainer)
            yield from () if apart is None else (apart,)
        if complete:
            yield left_alone(complete)
        if reduction is not None:
            yield closures.after_backward(steps.trainer, reduction.finish)
            if steps.overlaps and not complete:
                yield reduction.overlapping(self._are_complete)


def _merged(done: BatchResult) -> closures.ClosureOutput:
    """Make one result of the pieces of a micro-batch, but for those where ``training_step`` returned nothing."""
    ran = [part for part in zip(done.results, done.sizes, done.weights) if part[0] is not None]
    output = merge_outputs(*zip(*ran)) if ran else {"loss": None}
    return closures.ClosureOutput(output["loss"], output)
