"""The closures of automatic optimization, run whole or in pieces."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.compat import closures, loops, ranks
from lightning_ga.fit.attempts import Piece
from lightning_ga.fit.oom_retry import BatchResult, BatchTask, OomRetrier
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.snapshot.gradients import Accumulations, GradientMarks, left_alone

MakeClosure = Callable[[Any, Optimizer, int], Any]


class MicroBatchClosures:
    """Gives the loop closures that run a micro-batch whole or in pieces.

    Args:
        trainer: The Trainer.
        retrier: Runs batches in pieces.
        gradients: The weights of the window.
        by_hand: Whether gradients are averaged over ranks here, after all backward passes of a window.
        samples_again: Fetches the samples of the micro-batch again, where they are at hand.
    """

    def __init__(
        self,
        trainer: Any,
        retrier: OomRetrier,
        gradients: WindowGradients,
        *,
        by_hand: bool,
        samples_again: Callable[[], CollatedAgain | None],
    ) -> None:
        self.trainer, self.retrier, self.gradients = trainer, retrier, gradients
        self.by_hand, self.samples_again = by_hand, samples_again
        self.expected: int | None = None  # samples of the next micro-batch, where that is known
        self.parameters: list[Tensor] = []  # as a window finds them: walking through a module takes its time
        self.repeated: list[Tensor] | None = None  # added to more than once a pass; known once one went through

    def closure(self, make: MakeClosure, kwargs: Any, optimizer: Optimizer, batch_idx: int) -> "MicroBatchClosure":
        """The closure of one micro-batch."""
        return MicroBatchClosure(self, make, kwargs, optimizer, batch_idx)


class MicroBatchClosure:
    """Forward, zeroing of gradients and backward of one micro-batch."""

    def __init__(
        self, steps: MicroBatchClosures, make: MakeClosure, kwargs: Any, optimizer: Optimizer, batch_idx: int
    ) -> None:
        self._steps, self._make, self._kwargs = steps, make, kwargs
        self._optimizer, self._batch_idx = optimizer, batch_idx
        self._result = _Result(None)
        self._marks: GradientMarks | None = None
        self._begun = False  # an attempt runs; one whose samples do not reach the device has not begun
        self._zeroed = False  # a piece went through, and had gradients zeroed if it had to
        self._complete: dict[Piece | None, list[Tensor]] = {}  # gradients that a failed piece left complete

    def __call__(self, *_: Any) -> Tensor | None:
        """Run the micro-batch; its loss as the loop divides it."""
        steps, batch = self._steps, self._kwargs["batch"]
        self._zeroed, self._complete = False, {}
        job = BatchTask(
            batch,
            "training",
            self._run,
            steps.expected,
            weigh=self._share,
            failed=self._failed,
            again=steps.samples_again,
        )
        done = steps.retrier.run(job)
        self._result = _as_result(done)
        if steps.by_hand and loops.window_is_over(steps.trainer):
            ranks.average_over_ranks(steps.trainer)
        return self._result.loss

    def consume_result(self) -> "_Result":
        """What came of the micro-batch; it is let go of here."""
        result, self._result = self._result, _Result(None)
        return result

    def _run(self, part: Any, piece: Piece | None) -> dict[str, Any] | None:
        """One attempt at some samples; what ``training_step`` returned, the loss without its graph."""
        steps = self._steps
        closure = self._make({**self._kwargs, "batch": part}, self._optimizer, self._batch_idx)
        if self._zeroed:
            closures.zero_no_gradients(closure)
        starts_window = closures.zeroes_gradients(closure)
        if starts_window or not steps.parameters:
            steps.parameters = closures.parameters(steps.trainer)
        parameters = steps.parameters
        self._marks = None if starts_window else GradientMarks(parameters, steps.repeated or ())
        first_pass = Accumulations(parameters) if steps.repeated is None else None
        steps.gradients.keep()
        self._begun = True
        with ExitStack() as stack:
            if steps.by_hand or (piece is not None and not piece.is_last):
                stack.enter_context(closures.accumulating(steps.trainer))
            if piece is not None:
                stack.enter_context(steps.gradients.weighing_a_part(self._share(part, piece)))
                stack.enter_context(left_alone(self._complete_for(piece)))
            if first_pass is not None:
                stack.enter_context(first_pass.counted())
            closure()
        if first_pass is not None:
            steps.repeated = first_pass.repeated()
        self._begun, self._zeroed = False, True
        result = closure.consume_result()
        return None if result.loss is None else dict(result.asdict())

    def _share(self, part: Any, piece: Piece) -> float:
        """What a piece weighs in the micro-batch."""
        return self._steps.gradients.share_of(part, self._kwargs["batch"], samples=piece.samples, whole=piece.of)

    def _failed(self, piece: Piece | None) -> None:
        """Undo an attempt: gradients it touched are complete, unless it began the window: then they are zeroed anew."""
        begun, self._begun = self._begun, False
        if not begun:  # what was kept is from before an earlier piece, one that went through
            return
        self._steps.gradients.put_back()
        if self._marks is not None:
            self._complete[piece] = self._marks.put_back()

    def _complete_for(self, piece: Piece) -> list[Tensor]:
        """Parameters whose gradients already hold what a piece would add: it is part of one that failed."""
        around = [failed for failed in self._complete if failed is None or failed.contains(piece)]
        return list({id(p): p for failed in around for p in self._complete[failed]}.values())


@dataclass(slots=True)
class _Result:
    """What the loop reports of a micro-batch."""

    loss: Tensor | None
    extra: dict[str, Any] = field(default_factory=dict)

    def asdict(self) -> dict[str, Any]:
        return {"loss": self.loss, **self.extra}


def _as_result(done: BatchResult) -> _Result:
    """One result for the micro-batch; pieces for which ``training_step`` returned nothing are passed over."""
    if done.sizes:
        ran = [part for part in zip(done.results, done.sizes, done.weights) if part[0] is not None]
        output = merge_outputs(*zip(*ran)) if ran else None
    else:
        output = done.results[0]
    if output is None:
        return _Result(None)
    return _Result(output["loss"], {key: value for key, value in output.items() if key != "loss"})
