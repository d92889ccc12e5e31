"""Run batches of training in pieces that fit, if the step cuts them; the window's last pass exchanges gradients."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import closures
from lightning_ga.compat.place import LoopPlace
from lightning_ga.compat.reduction import Exchange
from lightning_ga.fit.data import TrainingData
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.pieces import Pieces
from lightning_ga.plan.accumulation import split_evenly
from lightning_ga.probe.limit import Limit


class BatchPasses:
    """Makes the closures of automatic optimization, each of which runs a batch as a whole or in pieces."""

    def __init__(
        self,
        trainer: Any,
        place: LoopPlace,
        gradients: Gradients,
        limit: Limit,
        exchange: Exchange | None,
        data: TrainingData,
    ) -> None:
        self._trainer, self._place, self._gradients, self._limit = trainer, place, gradients, limit
        self._exchange, self._data = exchange, data
        self.samples = 0  # of the window's batches so far, on this rank; 0 if the loader cuts
        self.sizes: tuple[int, ...] = ()  # of the pieces of the batch that runs
        self.in_pieces = False  # whether a batch was cut

    def begin_window(self) -> None:
        """Begin a window, or begin it again."""
        self.samples = 0

    def closure(self, lightning_closure: Any, make: Callable[..., Any], given: Any, *others: Any) -> Any:
        """Return the closure that runs one batch of the loop; see ``closures.intercepted_closures``."""
        if not self._data.source.cut_in_step:
            return partial(self._run_whole, lightning_closure)
        batch = given["batch"]
        self.sizes, weight = self._plan_pieces(batch)
        self.in_pieces |= len(self.sizes) > 1
        self.samples += sum(self.sizes)
        if len(self.sizes) == 1:
            return partial(self._run_whole, lightning_closure, batch, weight)

        def of_piece(piece: Any) -> Any:
            return make({**given, "batch": piece}, *others)

        return partial(self._run_pieces, of_piece, batch, self.sizes, weight)

    def _plan_pieces(self, batch: Any) -> tuple[tuple[int, ...], int]:
        """Return the samples of each piece of a batch, and the batch's weight in samples."""
        limit, cutter = self._limit.piece_samples, self._data.cutter_of_training()
        try:
            samples = cutter.count(batch)
            weight = cutter.weight(batch, samples)
        except LayoutError:  # a batch that cannot be cut runs whole if it fits
            samples = weight = self._data.batch_size
            if limit is not None and limit < samples:
                raise
        self._limit.cut_evenly(samples)
        return split_evenly(samples, 1 if limit is None else max(1, -(-samples // limit))), weight

    def _run_whole(self, closure: Any, batch: Any = None, samples: int = 0) -> Any:
        if samples:
            self._gradients.weigh_piece(batch, batch, samples=samples, of=samples)
        with self._pass(last=True):
            result = closures.run_closure(closure)
        self._finish_window()
        return result

    def _run_pieces(self, of_piece: Callable[[Any], Any], batch: Any, sizes: tuple[int, ...], samples: int) -> Any:
        """Run a batch in pieces, sum their gradients, and merge what they log and return."""
        cutter, each, start = self._data.cutter_of_training(), samples // max(1, sum(sizes)), 0
        pieces = Pieces(self._trainer.fit_loop.epoch_loop._results)
        for number, size in enumerate(sizes):
            piece, is_last = cutter.cut(batch, start, start + size), number + 1 == len(sizes)
            start += size
            closure = of_piece(piece)
            if number:
                closure._zero_grad_fn = None
            weight = self._gradients.weigh_piece(piece, batch, samples=size * each, of=samples)
            with ExitStack() as stack:
                stack.enter_context(self._pass(last=is_last))
                stack.enter_context(nullcontext() if is_last else closures.before_the_last(self._trainer))
                stack.enter_context(pieces.piece(samples=size, weight=weight))
                result = closures.run_closure(closure)
            if not is_last:
                self._gradients.settle()
            pieces.add(result.asdict() if result.loss is not None else None)
        self._finish_window()
        output = pieces.finish() or {}
        return type(result)(output.pop("loss", None), output)

    def _pass(self, *, last: bool) -> Any:
        if self._exchange is None:
            return nullcontext()
        return self._exchange.pass_(last=last and self._place.window_is_over)

    def _finish_window(self) -> None:
        if self._exchange is not None and self._place.window_is_over:
            self._exchange.finish()
