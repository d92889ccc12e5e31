"""The largest micro-batch of a fit: an argument, a window that fits, or from a checkpoint, the cache or a probe.

It is looked for only if a window does not fit as it is: at the start, when a schedule makes windows larger, or after an
error. An error lowers it.

Tested in tests/integration/test_probe.py and tests/integration/test_remembered.py.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.chunks import ChunkedModules
from lightning_ga.compat import ranks
from lightning_ga.errors import UserError
from lightning_ga.loading.rebatch import evaluates_again
from lightning_ga.loading.sample_sizes import SampleSizes
from lightning_ga.loading.trial_batches import TrialBatches
from lightning_ga.memory.oom import attempt, may_be_out_of_memory
from lightning_ga.plan.accumulation import ceil_div, ratio_of_speeds
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.records import Fits, ProbeResult, Recomputed, still_holds
from lightning_ga.plan.run_state import RunState
from lightning_ga.plan.size_cuts import SizeLimits
from lightning_ga.probe.cache import forget, hardware
from lightning_ga.probe.probed_trainer import Found, TrainingSetup, choose_recomputed, probe, recomputable
from lightning_ga.probe.prober import DoesNotFitError
from lightning_ga.probe.speed import Speed
from lightning_ga.recompute.wrapper import RecomputedParts, submodules

NO_LIMIT = 2**31
MANY = (3, 30)  # so many windows, of so many, that need submodules computed again: then they stay so


@dataclass(slots=True)
class RunningWindow:
    """The limit and the submodules that are computed again as a window begins, and which windows needed more."""

    number: int = 0
    names: tuple[str, ...] = ()
    samples: int | None = None
    lowest: int | None = None
    begins_again: bool = False
    recomputable: tuple[str, ...] | None = None  # all submodules that can be; ``None`` before that was asked
    failed: deque[int] = field(default_factory=lambda: deque(maxlen=MANY[0]))

    @property
    def is_frequent(self) -> bool:
        """Whether many of the last windows ran out of memory with one sample."""
        return len(self.failed) == MANY[0] and self.number - self.failed[0] < MANY[1]


class Limit:
    """Owns one number: the most samples of a micro-batch, or of a chunk with ``whole=``.

    It rises only if larger windows were asked about, and fit.
    """

    def __init__(self, trainer: Any, request: Request, options: Options, chunked: ChunkedModules | None) -> None:
        self._trainer = trainer
        self._request = request
        self._options = options
        self.chunked = chunked
        self.samples: int | None = None  # ``None`` before it is known
        self.fits: Fits | None = None  # a whole window that fits, so that nothing was looked for
        self.probe: ProbeResult | None = None  # ``None`` if there was no probe or it failed
        self._high = 0  # samples that the last question was about
        self._kind: Mapping[str, Any] | None = None  # the cache's description of the step; ``None`` without a cache
        self.lowest: int | None = None  # the limit after errors; ``None`` without any
        self.parts = RecomputedParts(trainer.lightning_module)
        self._window = RunningWindow()
        self._always = () if options.checkpoint == "auto" else options.checkpoint  # computed again, whatever fits
        submodules(trainer.lightning_module, self._always, "checkpoint=")
        if options.checkpoint and ranks.checkpoints_itself(trainer):
            raise UserError(
                f"checkpoint={options.checkpoint!r} and activation_checkpointing_policy= of "
                f"{type(trainer.strategy).__name__} both compute submodules again: give one of them."
            )
        self.of_ranks: tuple[int, ...] = ()  # the limits of all, if each rank has its own
        self.ratio: tuple[int, ...] = ()  # of the shares of ranks in a window; none if these are equal
        self.speed: Speed | None = None
        if options.shares == "speed":
            self.speed = Speed(trainer.strategy.root_device)
        self.initial_micro_batch: int | None = None  # the micro-batch at the start, which ``accumulate=`` multiplies

    @property
    def is_known(self) -> bool:
        """Whether it has been found, or given."""
        return self.samples is not None

    @property
    def most(self) -> int:
        """The most samples of a micro-batch, piece or chunk; ``NO_LIMIT`` before that is known."""
        return NO_LIMIT if self.samples is None else self.samples

    @property
    def recomputed(self) -> Recomputed | None:
        """What was chosen to be computed again, so that one sample fits; ``None`` if nothing was."""
        return None if self.probe is None else self.probe.recomputed

    @property
    def unit(self) -> str:
        """What the limit bounds: ``"micro-batches"`` or ``"chunks"``."""
        return "micro-batches" if self.chunked is None else "chunks"

    @property
    def micro_batch(self) -> int | None:
        """The most samples of a micro-batch; ``None`` before that is known."""
        return self.samples if self.samples is None or self.chunked is None else NO_LIMIT

    @property
    def piece_samples(self) -> int | None:
        """The most samples of a piece of a batch that is cut in the step; ``None`` if whole batches run."""
        return None if self.chunked is not None or self.samples == NO_LIMIT else self.samples

    @property
    def chunked_names(self) -> tuple[str, ...]:
        """The names of submodules that run in chunks over whole batches."""
        return () if self.chunked is None else self.chunked.names

    @property
    def is_asked_at_once(self) -> bool:
        """Whether the limit itself is wanted, whatever fits."""
        request = self._request
        options = self._options
        wanted = options.budget is not None or options.objective == "throughput" or request.factor(0) is not None
        return (
            wanted
            or self.differs_by_rank
            or bool(options.whole)
            or options.size_of is not None
            or ranks.is_sharded(self._trainer)
        )

    def is_to_be_asked_again(self, high: int) -> bool:
        """Return whether windows now use micro-batches of ``high`` samples, and nothing is known of so many."""
        return self.lowest is None and self.samples is not None and high > self._high and self.samples >= self._high

    def hardware(self) -> str:
        """Describe the hardware; a limit found on other hardware is not used."""
        return hardware(self._trainer, self._options.budget)

    def find(self, setup: TrainingSetup, restored: RunState | None, *, high: int, recipe: int, varies: bool) -> None:
        """Find the limit for micro-batches of at most ``high`` samples; with ``varies``, later batches may be larger.

        If the probe fails, training uses micro-batches of the ``recipe``.
        """
        self._high = high
        if self.probe is None:
            self.parts.use(self._always)
        known = self._valid_here(restored)
        high = ranks.smallest_over_ranks(self._trainer, high) if varies else high  # first batches differ by rank
        found = self._probe_or_recall(setup, known, high, recipe)
        is_whole = found == NO_LIMIT or (varies and self.chunked is None and found >= high)
        self.samples = self._request.capped(NO_LIMIT) if is_whole else min(high, found)
        self._begin_with(known, setup.sizes)

    def use_given(self, restored: RunState | None, sizes: SampleSizes | None) -> None:
        """Use the micro-batch that was asked for, or what an error has left of it in the restored run."""
        self.parts.use(self._always)
        self.samples = self._request.capped(self._request.micro_batch or NO_LIMIT)
        self._begin_with(self._valid_here(restored), sizes)

    def _valid_here(self, restored: RunState | None) -> RunState | None:
        """Return a restored state if all ranks run on the hardware of the checkpoint's first rank."""
        if restored is None or self.differs_by_rank:
            return None
        same = restored.hardware == self.hardware()
        return restored if ranks.smallest_over_ranks(self._trainer, int(same)) else None

    def _begin_with(self, known: RunState | None, sizes: SampleSizes | None) -> None:
        self.initial_micro_batch = self.initial_micro_batch or self.micro_batch
        if known is not None and known.limit is not None:  # memory ran out in that run
            self.samples = self.lowest = min(self.most, known.limit)
        if self.recomputed is not None:
            self.parts.use(self.recomputed.names)
        self._set_chunk_size()
        self.set_size_limits(sizes)

    def _probe_or_recall(self, setup: TrainingSetup, restored: RunState | None, high: int, recipe: int) -> int:
        trainer = self._trainer
        known = None if restored is None else restored.probe
        is_allowed = known is not None and (known.recomputed is None or self._options.checkpoint == "auto")
        if known is not None and is_allowed and still_holds(known, known.budget_bytes, high):
            self.probe = replace(known, source="checkpoint", steps=0, seconds=0.0)
            return known.fastest or known.limit
        if evaluates_again(trainer.optimizers[0]) and self._options.budget is None:
            return high  # LBFGS's history outgrows a trial of one step: whole batches, until an error
        try:
            if trainer.world_size > 1:
                _require_cut_on_all_ranks(trainer, setup.batches)
            found = self._probe(setup, high, whole_first=not self.is_asked_at_once)
            self.fits = found.fits
            if self.fits is not None:
                return high
            self.probe = found.probe
            self._kind = found.kind
        except LayoutError:
            # Batches that cannot be cut run as they are, unless they are to be smaller.
            if self._options.budget is not None or self._request.most is not None:
                raise
            return NO_LIMIT
        except Exception as error:
            if may_be_out_of_memory(error) or isinstance(error, UserError) or trainer.world_size > 1:
                raise  # ranks probe together or not at all
            said = str(error).partition("\n")[0].rstrip(".")  # a data worker's has a traceback below
            if "Creating a new Tensor subclass" in said:
                said += " (PyTorch refuses Tensor.__new__ while the probe records memory; training itself may use it)"
            rank_zero_warn(
                f"The probe found no limit, because a trial step ended in {type(error).__name__}: {said}. Training "
                f"uses micro-batches of the recipe, {recipe} samples; give micro_batch_size=… to choose."
            )
            return recipe
        return high if self.probe is None else self.probe.fastest or self.probe.limit

    def _probe(self, setup: TrainingSetup, high: int, *, whole_first: bool) -> Found:
        """Probe; if not one sample fits, and that is asked for, with submodules computed again."""
        try:
            return probe(setup, self._options, high=high, chosen=self.recomputed, whole_first=whole_first)
        except DoesNotFitError as error:
            if self._options.checkpoint != "auto" or self.parts.names:
                raise
            plain = error.with_traceback(None)
        chosen = choose_recomputed(setup, self._options, plain)
        self.parts.use(chosen.names)
        return probe(setup, self._options, high=high, chosen=chosen)

    def recompute_window(self, setup: TrainingSetup) -> bool:
        """Compute again in the running window all that can be; return whether that is more than before."""
        window = self._window
        before = self.parts.names
        if window.recomputable is None:
            self.parts.use(())  # what is computed again shows nothing
            window.recomputable = recomputable(setup)
        self.parts.use(window.recomputable or before)
        if self.parts.names == before:
            return False
        self.leave_window()
        return True

    def leave_window(self) -> None:
        """Note that the running window needs more than smaller micro-batches, so that the next begins as it had."""
        self._window.failed.append(self._window.number)

    def begin_window(self) -> None:
        """Begin a window, or begin it again after an error.

        After one that ran out of memory with one sample, the next begins as that one had begun, unless there were many.
        """
        window = self._window
        if window.begins_again:
            window.begins_again = False
            return
        if window.number in window.failed and not window.is_frequent:
            self.parts.use(window.names)
            self.samples = window.samples
            self.lowest = window.lowest
            self._set_chunk_size()
        window.number += 1
        window.names = self.parts.names
        window.samples = self.samples
        window.lowest = self.lowest

    def fall(self, samples: int) -> None:
        """Lower the limit, because a larger pass has run out of memory and its window can run again."""
        self._window.begins_again = True
        self.samples = samples
        self.lowest = samples
        if self._kind is not None:  # the next run probes again
            forget(self._kind)
        self._set_chunk_size()

    def search_below(self, setup: TrainingSetup, failed: int) -> int | None:
        """Look for the limit after a pass of so many samples has run out of memory; ``None`` if none below is found."""
        self.fits = None

        def search() -> Found:
            return probe(setup, self._options, high=failed, chosen=self.recomputed)

        found = attempt(search, lambda error: isinstance(error, Exception)).result
        if found is None or found.probe is None:
            return None
        self.probe = found.probe
        self._kind = found.kind
        return found.probe.limit if found.probe.limit < failed else None

    @property
    def differs_by_rank(self) -> bool:
        """Whether each rank has a limit of its own."""
        return self._options.shares != "equal"

    def share_out(self) -> None:
        """Tell each rank the limits of all, if each has its own; all ranks call this together.

        Shares are in proportion to these, or equal until speeds are known.
        """
        if not self.differs_by_rank:
            return
        self.of_ranks = tuple(ranks.of_all_ranks(self._trainer, self.most))
        if self.speed is None:
            self.ratio = self.of_ranks
        elif not self.ratio:
            self.ratio = (1,) * len(self.of_ranks)

    def follow_speeds(self) -> bool:
        """Let shares follow the speeds of ranks, if these have been measured; return whether shares are others now.

        All ranks call this together.
        """
        if self.speed is None or not self.speed.is_measured:
            return False
        before = self.ratio
        self.ratio = ratio_of_speeds(ranks.of_all_ranks(self._trainer, self.speed.take()), before=before)
        return self.ratio != before

    def agree(self) -> None:
        """Set the limit to the smallest of all ranks, which call this together as an epoch begins.

        If each rank has its own, their shares of windows follow.
        """
        self.share_out()
        self.follow_speeds()
        if self.differs_by_rank:
            return
        if self.samples is not None:
            smallest = ranks.smallest_over_ranks(self._trainer, self.samples)
            if smallest < self.samples:
                self.samples = self.lowest = smallest
                self._set_chunk_size()

    def set_size_limits(self, sizes: SampleSizes | None) -> None:
        """Set the limits of samples × longest: the probe's, or the limit × the longest size."""
        if sizes is not None and self.samples is not None:
            most = self._request.most or NO_LIMIT
            found = self.probe
            if found is None or found.sizes is None:
                sizes.limits = self.samples, SizeLimits(self.samples * sizes.longest, most)
            else:
                sizes.limits = found.limit, replace(found.sizes, samples=min(most, found.sizes.samples))

    def cut_evenly(self, samples: int) -> None:
        """Let the chunks of a batch of so many samples have about the same size."""
        if self.chunked is not None and self.samples is not None and samples:
            size = self.chunked.size
            size.window = samples
            size.samples = ceil_div(samples, ceil_div(samples, self.samples))

    def _set_chunk_size(self) -> None:
        if self.chunked is not None:
            self.chunked.size.samples = self.samples


def _require_cut_on_all_ranks(trainer: Any, batches: TrialBatches) -> None:
    """Raise ``LayoutError`` on all ranks if one cannot cut its batches: trials end in votes, which need all ranks."""
    why = ""
    try:
        if not batches.empty:
            batches.make(min(2, batches.most), lambda batch: batch)
    except LayoutError as error:
        why = str(error)  # the error itself would keep batches alive
    if not ranks.smallest_over_ranks(trainer, int(not why)):
        raise LayoutError(why or "The batches of another rank cannot be cut into samples.")
