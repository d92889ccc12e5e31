"""Run the loop's batches, whole or in pieces that fit; the last pass of a window exchanges gradients between ranks.

Tested in tests/integration/test_survive.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat import closures
from lightning_ga.compat.compiled import CompiledModules
from lightning_ga.compat.loop_counters import LoopPlace
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.errors import UserError
from lightning_ga.fit.messages import IN_A_PIECE
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.pieces import Pieces, cut_in_pieces
from lightning_ga.fit.step_planner import StepPlanner
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.accumulation import micro_batch_sizes


class WholePasses:
    """Runs each batch of the loop in one pass, the last of a window with an exchange of gradients, if there is one."""

    def __init__(self, place: LoopPlace, exchange: AnyExchange | None) -> None:
        self._place = place
        self.exchange = exchange

    def closure(self, lightning_closure: Any, *_: Any) -> Callable[[], Any]:
        """Return the closure that runs one batch of the loop; see ``closures.intercepted_closures``."""
        return partial(self.run, lightning_closure)

    def run(self, closure: Any) -> Any:
        """Run one pass over a whole batch."""
        with self._pass(is_last=True):
            result = closures.run_closure(closure)
        self._finish_window()
        return result

    def _pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        if self.exchange is None:
            return nullcontext()
        return self.exchange.pass_(last=is_last and self._place.window_is_over)

    def _finish_window(self) -> None:
        if self.exchange is not None and self._place.window_is_over:
            self.exchange.finish()


class BatchPasses(WholePasses):
    """Makes the closures of automatic optimization, each of which runs a batch as a whole or in pieces."""

    def __init__(self, parts: FitParts, cutter: Callable[[], BatchCutter], planner: StepPlanner) -> None:
        super().__init__(parts.place, exchange=None)  # until it is known
        self._parts = parts
        self._compiled = CompiledModules(self._parts.trainer)
        self._cutter = cutter
        self._planner = planner  # knows the size of a batch whose samples cannot be counted
        self.samples = 0  # of the window's batches so far, on this rank, each of its largest loader
        self.sizes: tuple[int, ...] = ()  # of the pieces of the window's last batch, in ``StepPlanner.units``
        self.has_cut = False  # whether a batch of this fit was cut

    def begin_window(self) -> None:
        """Begin a window, or begin it again."""
        self.samples = 0
        self.sizes = ()

    def closure(
        self, lightning_closure: Any, make_closure: Callable[..., Any], step_kwargs: Any, *others: Any
    ) -> Callable[[], Any]:
        """Return the closure that runs one batch of the loop; see ``closures.intercepted_closures``."""
        batch = step_kwargs["batch"]
        limit = self._parts.limit
        units, batch_samples = self._count(batch)
        limit.size_chunks(units)
        self.sizes = micro_batch_sizes(units, limit.of_pass, self._parts.request.multiple)
        self.samples += batch_samples
        if len(self.sizes) == 1:
            return partial(self._run_whole, lightning_closure, batch, batch_samples)
        self.has_cut = True

        def of_piece(piece: Any) -> Any:
            return make_closure({**step_kwargs, "batch": piece}, *others)

        return partial(self._run_pieces, of_piece, batch, batch_samples)

    def _count(self, batch: Any) -> tuple[int, int]:
        """Return the units into which a batch can be cut, and its samples, of its largest loader."""
        cutter = self._cutter()
        try:
            units = cutter.count(batch)
            return units, cutter.weight(batch, units)
        except LayoutError:  # a batch that cannot be cut runs whole if it fits
            if self._parts.limit.of_pass < self._planner.units:
                raise
            return self._planner.units, self._planner.batch_size

    def _run_whole(self, closure: Any, batch: Any, batch_samples: int) -> Any:
        self._parts.gradients.weigh_piece(batch, batch, samples=batch_samples, batch_samples=batch_samples)
        return self.run(closure)

    def _run_pieces(self, of_piece: Callable[[Any], Any], batch: Any, batch_samples: int) -> Any:
        """Run a batch in pieces, sum their gradients, and merge what they log and return."""
        self._parts.values.begin_merging()
        samples_of_unit = batch_samples // sum(self.sizes)
        largest_batch = max(batch_samples, self._planner.batch_size)
        pieces = Pieces(self._parts.trainer.fit_loop.epoch_loop._results, largest_batch)
        result: Any = None  # of the last piece that has run
        for number, (piece, units, is_last) in enumerate(cut_in_pieces(self._cutter(), batch, self.sizes)):
            self._compiled.mark(tensors_in(piece), units)
            closure = of_piece(piece)
            samples = units * samples_of_unit
            share = self._parts.gradients.weigh_piece(piece, batch, samples=samples, batch_samples=batch_samples)
            with ExitStack() as stack:
                stack.enter_context(self._pass(is_last=is_last))
                if not is_last:
                    stack.enter_context(closures.before_the_last(self._parts.trainer))
                # The last pass logs at once, because other ranks may exchange values in it.
                stack.enter_context(pieces.piece(samples=samples, share=share, units=units, logs_at_once=is_last))
                result = self._run_piece(closure, samples_of_unit, zeroes=number == 0)
            if not is_last:  # ``before_the_last`` leaves out the hook that settles gradients
                self._parts.gradients.settle()
            pieces.add(result.asdict() if result.loss is not None else None)
        self._finish_window()
        output = pieces.finish() or {}
        return type(result)(output.pop("loss", None), output)  # the type is Lightning's

    def _run_piece(self, closure: Any, samples_of_unit: int, *, zeroes: bool) -> Any:
        try:
            return closures.run_closure(closure, zeroes=zeroes)
        except Exception as error:
            if not isinstance(error, UserError) and not is_out_of_memory(error):
                sizes = [size * samples_of_unit for size in self.sizes]
                error.add_note(IN_A_PIECE.format(samples=sum(sizes), sizes=", ".join(map(str, sizes))))
            raise
