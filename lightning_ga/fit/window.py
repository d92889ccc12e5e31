"""The optimizer windows of training: the closures of the loop run their micro-batches, which are undone together."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import elements
from lightning_ga.batch.merge import in_order, merge_outputs
from lightning_ga.compat import closures, loops, ranks
from lightning_ga.compat.reduction import WindowReduction
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.parts import BatchResult, Part, Piece, Window
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.fit.window_run import run_window
from lightning_ga.plan.exactness import BATCHES_CHANGED
from lightning_ga.plan.weights import WindowWeights

LOOKS = 3  # batches of an epoch before which parts are looked for that hooks may have added
WATCHED = 8  # windows begun in pieces in which changes by hooks around zeroing are looked for
KEPT_ON_HOST = 2**26  # numbers (256 MiB of float32) of a window's batches; larger ones are fetched again


@dataclass(slots=True, eq=False, kw_only=True)
class MicroBatch(Part):
    """One micro-batch of a window."""

    given: dict[str, Any]  # what the step gets, the batch among it
    weights: WindowWeights  # before it has run
    loss: float = 0.0  # if the optimizer needs that of the whole window


class TrainingWindow(Window):
    """Runs the micro-batches of the window that is trained on.

    A window that ``fills_up`` may hold micro-batches without a sample, which are not to be run.
    """

    stage = "training"

    def __init__(
        self, trainer: Any, engine: Engine, gradients: WindowGradients, data: TrainingData, *, fills_up: bool
    ) -> None:
        self._trainer, self._engine, self._gradients = trainer, engine, gradients
        self._data, self._reducer, self._fills_up = data, engine.reducer, fills_up
        self.parts: list[MicroBatch] = []
        self.savepoint = engine.savepoint("training")
        self._evaluates_again = closures.evaluates_again(trainer.optimizers[0])
        owners = [trainer.lightning_module, *trainer.callbacks]
        hooks = ("on_before_zero_grad", "optimizer_zero_grad")
        self._has_zeroing_hooks = closures.has_hook(owners, *hooks) or closures.zeroes_by_itself(trainer.optimizers[0])
        # Hooks between two batches may change the module: those of callbacks, which rarely do, are watched for that.
        self._has_hooks_between = closures.has_hook(owners, *closures.BETWEEN_BATCHES)
        self._module_has_hooks_between = closures.has_hook(owners[:1], *closures.BETWEEN_BATCHES)
        engine.watches_batches = closures.has_hook(owners, "on_train_batch_start")
        self._module_changes_batches = closures.has_hook(owners[:1], "on_train_batch_start")
        self._warned = False
        self._optimizer: Any = None  # as the loop has wrapped it
        self._whole: Any = None  # Lightning's closure of the current micro-batch, for its first pass
        self._make: Callable[..., Any] = lambda *_: None
        self._has_run = False  # whether an optimizer has evaluated the current closure
        self._watched = WATCHED  # windows that are left to be watched
        self._lacks_earlier = False  # whether an optimizer evaluates the last micro-batch of a window alone
        self._zeroing = "before"  # "before" the window's gradients are zeroed, "within" that, or "after" it
        self._withheld: torch.Tensor | None = None  # loss of the last piece, while hooks after it are withheld
        self._reduction: WindowReduction | None = None
        self._last_loss: torch.Tensor | None = None  # of a window that is filled up
        self._kept = 0  # numbers in the batches of the window that are kept on the host
        self.is_updating = False  # whether all passes are done: what follows is the optimizer's update

    # --- what the loop calls -------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Look through the module again: parts may have been added."""
        if self._engine.policy.retries:
            self.savepoint.look_again()
        if self._reducer is not None:
            self._reducer.begin_epoch()

    def end_batch(self) -> bool:
        """End a micro-batch, and return whether its window is over."""
        is_over, self.is_updating = self.is_updating, False
        return is_over

    def closure(self, whole: Any, make: Callable[..., Any], given: Any, optimizer: Any, number: int) -> Any:
        """Return what runs one micro-batch; see ``closures.intercepted_closures``."""
        engine, batch = self._engine, given["batch"]
        if not engine.is_active:
            return partial(closures.run_closure, whole)
        self.is_updating = self._has_run = False
        if self._fills_up and not self._data.source.chunk(number).count:
            return self._run_empty
        self._make, self._whole, self._optimizer = make, whole, optimizer
        is_changed = engine.watches_batches and engine.is_changed(batch)
        cuts_in_loader = not self._data.source.cut_in_step and self._trainer.accumulate_grad_batches > 1
        # The check does not run hooks of callbacks, so it cannot know.
        if is_changed and cuts_in_loader and not self._module_changes_batches:
            self._data.exactness.found_unknown(BATCHES_CHANGED)
        part = MicroBatch(
            batch,
            number,
            engine.move,
            expected=self._data.expected(number),
            host=engine.host,
            is_changed=is_changed,
            given=given,
            weights=self._gradients.weights,
        )
        return partial(self._run, part)

    def _run(self, part: MicroBatch, *_: Any) -> Any:
        """Run the micro-batch; its result, Lightning's own if it ran whole."""
        is_last, again, self._has_run = loops.window_is_over(self._trainer), self._has_run, True
        if again and self._evaluates_again and len(self.parts) > 1:
            result = self._run_window_again()
        else:
            begins = self._add(part, again=again)
            if is_last:
                self._begin_reduction()
            result = run_window(self._engine, self, begins=begins)
            reporter = self._engine.reporter
            if result.sizes and self._data.source.cut_in_step and not (reporter.events or reporter.untold):
                self._data.exactness.tell_if_untold()  # a batch has outgrown the plan
            if self._reduction is not None or self._withheld is not None:
                self._finish(result)
        self.is_updating = is_last
        output = self._engine.retry_once(lambda: _merged(result)) if result.sizes else result.results[0]
        if self._fills_up and output.loss is not None:
            self._last_loss = output.loss.detach()
        if is_last and self._evaluates_again:
            return output if len(self.parts) == 1 else closures.ClosureOutput(self._loss(), output.asdict())
        if is_last:
            self.parts = []
        else:
            self._let_go(part)
            if self._has_hooks_between and self._engine.policy.retries:
                self.savepoint.begin_hooks(always=self._module_has_hooks_between)
        return output

    def _run_empty(self, *_: Any) -> Any:
        """Leave out a micro-batch that only fills its window up.

        Its loss is that of the last that ran: without one a gradient scaler would skip the step. An optimizer may
        evaluate the window again all the same.
        """
        is_last, again, self._has_run = loops.window_is_over(self._trainer), self._has_run, True
        if again and self._evaluates_again:
            self._run_window_again()
        elif is_last:
            self._begin_reduction()
            self._finish(BatchResult([True]))
        self.is_updating = is_last
        last = torch.zeros(()) if self._last_loss is None else self._last_loss
        loss = self._loss() if self._evaluates_again else last
        return closures.ClosureOutput(loss, {"loss": loss})

    def _add(self, part: MicroBatch, *, again: bool) -> bool:
        """Add the micro-batch that the loop has come to, and return whether a window begins with it.

        One also begins if an optimizer evaluates the micro-batch's closure ``again``, without those before.
        """
        place, retries = part.number % self._trainer.accumulate_grad_batches, self._engine.policy.retries
        if again:
            self._warn_of_second_evaluation()
        begins = again or place == 0 or not self.parts
        if begins:
            self.parts, self._kept = [], 0
            self._zeroing = "after" if place else "before"
            self._lacks_earlier = bool(again and place)
            self._gradients.put_back(part.weights)
            if part.number < LOOKS and retries:
                self.savepoint.look_again()  # metrics may come where an epoch begins, as trackers of them do
        elif retries and (self._has_hooks_between or self._engine.has_validated):
            always = self._module_has_hooks_between or self._engine.has_validated
            self.savepoint.mark(len(self.parts), always=always)
        self._engine.has_validated = False
        self.parts.append(part)
        return begins

    def _run_window_again(self) -> BatchResult:
        """Run all micro-batches of the window at the weights that the optimizer has come to."""
        counted = self._gradients.weights
        self._zeroing = "before"  # as in each evaluation of a whole batch
        self._gradients.put_back(self.parts[0].weights)
        self._begin_reduction()
        result = run_window(self._engine, self, begins=True, all_parts=True)
        self._gradients.put_back(counted)  # what the window holds has been counted before
        self._finish(result)
        return result

    def _begin_reduction(self) -> None:
        if (reducer := self._reducer) is not None:
            summed = self._trainer.accumulate_grad_batches > 1
            self._reduction = self._engine.retry_once(lambda: reducer.window(summed=summed))

    def _finish(self, result: BatchResult) -> None:
        """Receive averages, and call hooks that were withheld."""
        if self._reduction is not None and self._reducer is not None:
            if not self._reduction.is_over:  # no backward pass has done it
                self._reduction.finish()
            self._reducer.check()
            ranks.share_buffers(ranks.distributed_module(self._trainer))
            self._reduction = None
        if self._withheld is not None and result.results[-1] is None:  # no pass of the last piece called them
            closures.call_after_backward(self._trainer, self._withheld)
        self._withheld = None

    def _loss(self) -> torch.Tensor:
        """Return the loss of the whole window."""
        total = sum(part.weights.weight * part.loss for part in self.parts)
        return torch.tensor(self._gradients.window_scale() * total, dtype=torch.float64)

    def _let_go(self, part: MicroBatch) -> None:
        """Keep no batch that can be had again: a GPU's stays on the host, a CPU's is fetched again."""
        part.given["batch"] = None  # the loop reads it no more
        if part.is_changed:
            return
        if part.host is not None:
            part.batch, part.move = part.host, self._engine.mover
            self._kept += elements(part.batch)
        if not self._data.source.streams and (part.host is None or self._kept > KEPT_ON_HOST):
            part.batch = part.host = None

    # --- what the engine calls -----------------------------------------------------------------

    def run_pass(self, part: MicroBatch, batch: Any, piece: Piece | None, weight: float) -> Any:
        """Run forward and backward; return Lightning's result, or of a piece the step's output as a dict."""
        gradients, closure, self._whole = self._gradients, self._whole, None
        is_first_run = closure is not None and piece is None
        if not is_first_run:
            closure = self._make({**part.given, "batch": batch}, self._optimizer, part.number)
        if (zero := closure._zero_grad_fn) is not None:
            in_pieces = piece is not None and not piece.is_last
            closure._zero_grad_fn = None if self._zeroing == "after" else partial(self._zero, in_pieces, zero)
        if is_first_run and self._reducer is None:
            result = closures.run_closure(closure)
        else:
            if piece is None or piece.start == 0:
                gradients.put_back(part.weights)
            if piece is not None:
                gradients.weigh_a_part(weight)
            completes = piece is None or piece.is_last
            with ExitStack() as stack:
                for context in self._contexts(part, completes=completes):
                    stack.enter_context(context)
                result = closures.run_closure(closure)
            if completes:
                gradients.weigh_all()
        if result.loss is None:
            gradients.skip()
        if self._evaluates_again:
            loss = 0.0 if result.loss is None else float(result.loss)
            part.loss = loss if piece is None else weight * loss + (part.loss if piece.start else 0.0)
        if piece is None:
            return result
        return None if result.loss is None else result.asdict()

    def weigh(self, part: MicroBatch, cut: Any, piece: Piece) -> float:
        """Return what a piece weighs in its micro-batch: its samples, or what ``normalize`` counts."""
        return self._gradients.share_of(cut, part.batch, samples=piece.samples, whole=piece.of)

    def undo(self) -> str | None:
        """Zero gradients as the optimizer would, and set aside the averages that other ranks have sent."""
        closures.undo_half_made_scale(self._trainer)
        self._whole = self._withheld = None
        first = self.parts[0]
        self._gradients.put_back(first.weights)
        if self.savepoint.changed_by_hooks:
            self._data.exactness.found_changed({self.savepoint.changed_by_hooks: None})
        if self._reduction is not None:
            self._reduction.set_aside()
        if self._lacks_earlier:
            return "gradients between two evaluations of the optimizer's closure"
        if self._zeroing == "within" and self._has_zeroing_hooks:
            hooks = "on_before_zero_grad, optimizer_zero_grad, zero_grad"
            return f"what hooks around the zeroing of gradients change ({hooks})"
        if self._zeroing != "after":
            return None
        closures.zero_gradients(self._trainer, self._optimizer, first.number)
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(bool((grad._values() if grad.is_sparse else grad).any()) for grad in gradients):
            return "gradients, in a way of its own to zero them"
        return None

    def gradients_left(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield gradients that no optimizer zeroes, with their names."""
        zeroed = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._trainer.lightning_module.named_parameters():
            if parameter.grad is not None and id(parameter) not in zeroed:
                yield f"{name}.grad", parameter.grad

    def _zero(self, in_pieces: bool, zero: Callable[[], None]) -> None:
        """Zero gradients, and run ``on_before_zero_grad`` once a window: later pieces meet what it changed."""
        self._zeroing = "within"
        if self._has_zeroing_hooks and self.savepoint.is_taken:
            looks = in_pieces and self._watched > 0
            self._watched -= looks
            if changed := self.savepoint.around_zeroing(zero, look=looks):
                self._data.exactness.found_between_pieces(changed)
        else:
            zero()
        self._zeroing = "after"

    def _contexts(self, part: MicroBatch, *, completes: bool) -> Iterator[AbstractContextManager[Any]]:
        """Yield contexts in which the backward pass reduces, or calls hooks, only if it should."""
        trainer, is_current = self._trainer, part is self.parts[-1]
        if not is_current:
            yield loops.at_earlier_batch(trainer, len(self.parts) - 1 - self.parts.index(part))
        if not completes:
            yield closures.before_the_last(trainer, self._withhold)
        if self._reducer is not None or not completes or not is_current:
            apart = closures.accumulating(trainer)
            yield from () if apart is None else (apart,)
        if self._reducer is not None:
            reduction = self._reduction if completes and is_current else None
            may_overlap = "training" not in self._engine.lockstep
            yield self._reducer.around_backward(trainer, reduction, may_overlap=may_overlap)

    def _withhold(self, loss: torch.Tensor) -> None:
        """Do what is ours after a backward pass; hooks of others wait until the gradients of the batch are complete."""
        self._withheld = loss
        self._gradients.settle()

    def _warn_of_second_evaluation(self) -> None:
        """Warn once if an optimizer (SAM, say) evaluates a closure again that holds a part of the window."""
        if self._warned or self._evaluates_again or self._trainer.accumulate_grad_batches == 1:
            return
        self._warned = True
        name = type(self._trainer.optimizers[0]).__name__
        rank_zero_warn(
            f"Accumulation is not exact: {name} evaluates its closure more than once a step, which holds only the last "
            'micro-batch of the window. Use micro_batching="step" with accumulate_grad_batches=1, which make a window '
            "of one batch.",
            category=ExactnessWarning,
        )


def _merged(result: BatchResult) -> closures.ClosureOutput:
    """Make one result of the pieces of a micro-batch, but for those of which ``training_step`` returned nothing."""
    ran = [part for part in zip(result.results, result.sizes, result.weights) if part[0] is not None]
    output = merge_outputs(*zip(*ran)) if ran else {"loss": None}
    if len(ran) > 1 and len(ran) == len(result.results) and result.order:
        output = in_order(output, ran[0], result.order)
    return closures.ClosureOutput(output["loss"], output)
