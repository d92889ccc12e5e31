"""The optimizer windows of training: each is a transaction of its micro-batches.

The closures of the loop run micro-batches whole, or in pieces where they are too large. Where memory runs out, gradients
are zeroed, what else the window has changed is put back, and its micro-batches run again, from the first on.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.compat import closures, loops, ranks
from lightning_ga.compat.reduction import GradientReducer, WindowReduction
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.engine import Done, Engine, Part
from lightning_ga.fit.pieces import Piece
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.batch_source import BatchSource, ReadyMadeBatches
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.plan.window_weights import WindowWeights


LOOKS = 3  # batches of an epoch before which parts are looked for that hooks may have added


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer calls its closure more than once."""
    return isinstance(optimizer, torch.optim.LBFGS)


@dataclass(frozen=True, slots=True)
class TrainingBatches:
    """What is known of the batches of training."""

    source: Callable[[], BatchSource] = lambda: ReadyMadeBatches(list)  # how they are made
    verdict: Callable[[], str] = str  # says in a sentence whether a batch in parts has the gradient of the whole
    samples: Callable[[int], int | None] = lambda _: None  # how many the one of a number should hold, where known
    samples_again: Callable[[int], CollatedAgain | None] = lambda _: None  # those samples, where at hand
    samples_of_next: Callable[[Any], int | None] = lambda _: None  # how many the next one should hold
    is_empty: Callable[[int], bool] = lambda _: False  # whether one, by its number, only fills its window up


@dataclass(slots=True, eq=False)
class MicroBatch(Part):
    """One micro-batch of a window."""

    given: tuple[Any, ...] = ()  # what closures are made of: what the step gets besides the batch, optimizer, number
    weights: Any = None  # of the window, before it has run
    prepared: Any = None  # Lightning's closure of it, for its first pass
    loss: float = 0.0  # where the optimizer needs that of the whole window
    host: Any = None  # the batch on the host, and what moves it


class TrainingWindow:
    """Runs the micro-batches of the window that is trained on.

    Args:
        trainer: The Trainer.
        engine: Runs batches.
        gradients: The weights of the window.
        batches: What is known of the micro-batches.
        reducer: Averages gradients over ranks, where that is done by hand.
        fills_up: Whether windows may hold micro-batches without a sample that are not to be run.
    """

    def __init__(
        self,
        trainer: Any,
        engine: Engine,
        gradients: WindowGradients,
        batches: TrainingBatches,
        reducer: GradientReducer | None,
        *,
        fills_up: bool,
    ) -> None:
        self._trainer, self._engine, self._gradients = trainer, engine, gradients
        self._batches, self._reducer, self._fills_up = batches, reducer, fills_up
        self._savepoint = engine.savepoint("training")
        self._evaluates_again = evaluates_again(trainer.optimizers[0])
        self._on_host = trainer.strategy.root_device.type == "cpu"
        self._hooks_at_zeroing = closures.has_hook(trainer, "on_before_zero_grad")
        self._warned = False
        self._parts: list[MicroBatch] = []
        self._make: Callable[..., Any] = lambda *_: None
        self._zeroed = False  # whether the window's gradients were
        self._withheld: torch.Tensor | None = None  # loss of a piece after which no hooks were called, as more follow
        self._reduction: WindowReduction | None = None
        self._last_loss: Any = None  # of a window that is filled up
        self.is_over = False  # whether all passes are done: what follows is the optimizer's step

    def begin_epoch(self) -> None:
        """Look through the module again: parts may have been added."""
        if self._engine.policy.retries:
            self._savepoint.look_again()
        if self._reducer is not None:
            self._reducer.begin_epoch()

    def closure(self, whole: Any, make: Callable[..., Any], kwargs: Any, optimizer: Any, number: int) -> Any:
        """Return what runs one micro-batch; see ``closures.intercepted_closures``."""
        if self._fills_up and self._batches.is_empty(number):
            return partial(self._run_empty, [])
        self._make = make
        engine, batches = self._engine, self._batches
        part = MicroBatch(kwargs["batch"], self._pass, engine.move, number)
        part.given, part.weights, part.prepared = (kwargs, optimizer, number), self._gradients.weights, whole
        part.host = None if self._on_host else engine.host
        part.expected = batches.samples(number)
        part.again = partial(batches.samples_again, number)
        part.weigh = self._weigh
        return partial(self._run, part, [])

    def _run_empty(self, evaluated: list[None], *_: Any) -> Any:
        """Leave out a micro-batch that only fills its window up; an optimizer may evaluate the window again all the same.

        Its loss is that of the last that ran: without one a gradient scaler would skip the step.
        """
        loss = torch.zeros(()) if self._last_loss is None else self._last_loss
        if self._evaluates_again:
            if evaluated:
                counted = self._gradients.weights
                self._undo()
                self._engine.run("training", self._parts, self._savepoint, self._undo, anew=True)
                self._gradients.put_back(counted)
            evaluated.append(None)
            loss = self._loss_of_window()
        return closures.ClosureOutput(loss, {"loss": loss})

    def _weigh(self, part: MicroBatch, cut: Any, piece: Piece) -> float:
        return self._gradients.share_of(cut, part.batch, samples=piece.samples, whole=piece.of)

    def _run(self, part: MicroBatch, evaluated: list[None], *_: Any) -> Any:
        """Run the micro-batch; its result, Lightning's own where it ran whole."""
        engine, factor = self._engine, self._trainer.accumulate_grad_batches
        is_last, again = loops.window_is_over(self._trainer), bool(evaluated)
        if again:
            self._warn_of_second_evaluation()
        # An optimizer that is known to evaluate again gets the whole window each time, others the last micro-batch.
        anew = again and self._evaluates_again and len(self._parts) > 1
        counted = self._gradients.weights
        if anew:
            self._undo()
        elif part.number % factor == 0 or again:
            self._parts, self._zeroed = [], self._zeroed and again and part.number % factor != 0
            self._gradients.put_back(part.weights)
        begins = not self._parts
        evaluated.append(None)
        if begins and part.number < LOOKS and engine.policy.retries:
            self._savepoint.look_again()  # metrics may come where an epoch begins, as trackers of them do
        if not anew:
            self._set_aside(part)
        if self._reducer is not None and is_last:
            self._reduction = self._reducer.window(summed=factor > 1)
        done = engine.run("training", self._parts, self._savepoint, self._undo, begins=begins, anew=anew)
        if anew:
            self._gradients.put_back(counted)  # what the window holds has been counted before
        if self._reduction is not None and self._reducer is not None:
            if not self._reduction.is_over:  # no backward pass has done it
                self._reduction.finish()
            self._reducer.check()
            ranks.share_buffers(ranks.distributed_module(self._trainer))
            self._reduction = None
        if self._withheld is not None and done.results[-1] is None:  # no pass of the last piece called them
            closures.call_after_backward(self._trainer, self._withheld)
        self._withheld = None
        result = engine.once_more(lambda: _merged(done)) if done.sizes else done.results[0]
        if self._fills_up and result.loss is not None:
            self._last_loss = result.loss.detach()
        self.is_over = is_last
        if is_last and self._evaluates_again and factor > 1:
            return closures.ClosureOutput(self._loss_of_window(), result.asdict())
        if is_last and not self._evaluates_again:
            self._parts = []
        return result

    def _loss_of_window(self) -> torch.Tensor:
        """Return the loss of the whole window."""
        total = sum(part.weights.weight * part.loss for part in self._parts)
        return torch.tensor(self._gradients.window_scale() * total, dtype=torch.float64)

    def _set_aside(self, part: MicroBatch) -> None:
        """Add a micro-batch to the window; those before it are kept on the host."""
        if self._parts:
            other = self._parts[-1]
            if other.host is not None:
                other.batch, other.move = other.host
                kwargs, *rest = other.given
                other.given = ({**kwargs, "batch": None}, *rest)
            other.prepared = None
        self._parts.append(part)

    def _undo(self) -> str | None:
        """Zero gradients as the optimizer would, and go on with nothing sent anew."""
        closures.undo_half_made_scale(self._trainer)
        self._withheld = None
        self._gradients.put_back(self._parts[0].weights)
        if self._reduction is not None:
            self._reduction.set_aside()
        if not self._zeroed:
            return None
        _, optimizer, number = self._parts[0].given
        self._trainer.fit_loop.epoch_loop.automatic_optimization._optimizer_zero_grad(number, optimizer)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.grad is not None and bool((p.grad._values() if p.grad.is_sparse else p.grad).any()) for p in trained):
            return "gradients, in a way of its own to zero them"
        return None

    def _pass(self, part: MicroBatch, batch: Any, piece: Piece | None, weight: float) -> Any:
        """Run forward and backward; Lightning's result, of a piece what ``training_step`` returned."""
        gradients, is_current = self._gradients, part is self._parts[-1]
        closure, part.prepared = part.prepared, None
        kwargs, *others = part.given
        if closure is None or batch is not kwargs["batch"]:
            closure = self._make({**kwargs, "batch": batch}, *others)
        if self._zeroed:
            closure._zero_grad_fn = None
        elif closure._zero_grad_fn is not None:
            closures.zero_through(closure, self._zero)
        if piece is None or piece.start == 0:
            gradients.put_back(part.weights)
        if piece is not None:
            gradients.weigh_a_part(weight)
        completes = piece is None or piece.is_last
        contexts = [*self._contexts(completes, is_current)]
        if contexts:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                result = closure.closure()
        else:
            result = closure.closure()
        if completes:
            gradients.weigh_all()
        if self._evaluates_again:
            loss = 0.0 if result.loss is None else float(result.loss)
            part.loss = loss if piece is None else weight * loss + (part.loss if piece.start else 0.0)
        if piece is None:
            return result
        return None if result.loss is None else result.asdict()

    def _zero(self, zero: Callable[[], None]) -> None:
        zero()
        self._zeroed = True
        if self._hooks_at_zeroing and self._savepoint.is_taken:
            self._savepoint.accept()

    def _contexts(self, completes: bool, is_current: bool) -> Iterator[AbstractContextManager[Any]]:
        """Yield contexts in which the backward pass reduces, or calls hooks, only if it should."""
        trainer = self._trainer
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
        """Warn once where an optimizer (SAM, say) evaluates a closure again that holds a part of the window."""
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


def _merged(done: Done) -> closures.ClosureOutput:
    """Make one result of the pieces of a micro-batch, but for those where ``training_step`` returned nothing."""
    ran = [part for part in zip(done.results, done.sizes, done.weights) if part[0] is not None]
    output = merge_outputs(*zip(*ran)) if ran else {"loss": None}
    return closures.ClosureOutput(output["loss"], output)
