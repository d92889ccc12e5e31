"""Find the limit: an argument, a window that fits as it is, or from a checkpoint, the cache or a probe.

Unless the limit itself is wanted, it is looked for only if a window does not fit as it is: at the start, where a
schedule makes windows larger, or after an error.

Tested in tests/integration/test_probe.py and tests/integration/test_remembered.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import ranks
from lightning_ga.errors import UserError
from lightning_ga.fit.limit import NO_LIMIT
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.loading.trial_batches import TrialBatches
from lightning_ga.memory.oom import attempt, may_be_out_of_memory
from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.plan.config import Options
from lightning_ga.plan.records import Fits, Recomputed, still_holds
from lightning_ga.plan.run_state import RunState
from lightning_ga.plan.size_cuts import SizeLimits
from lightning_ga.probe.budget import DoesNotFitError
from lightning_ga.probe.cache import forget
from lightning_ga.probe.cache import hardware as describe_hardware
from lightning_ga.probe.probed_trainer import FailedOnRanksError, TrainingSetup
from lightning_ga.probe.trainer_limit import Found, choose_recomputed, find_limit, memory_grows_over_steps, recomputable
from lightning_ga.recompute.wrapper import RecomputedParts, submodules


class LimitSearch:
    """Asks what fits, and sets the limit and the submodules that are computed again.

    ``kept`` returns what lies on the device so that a window can run again.
    """

    def __init__(
        self, parts: FitParts, options: Options, data: TrainingData, kept: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._parts = parts
        self._options = options
        self._data = data
        self._kept = kept
        self._is_wanted_at_once = (  # whether the limit itself is wanted, whatever fits
            options.budget is not None
            or options.objective == "throughput"
            or parts.request.is_factor
            or parts.shares.differ
            or bool(options.whole)
            or options.size_of is not None
            or ranks.is_sharded(self._parts.trainer)
        )
        self._asked = 0  # samples that the last question was about, on this rank
        self.found = Found()  # the answer to it: searches set this, and errors lower ``Limit`` alone
        self.recomputed = RecomputedParts(self._parts.trainer.lightning_module)
        self._always = () if options.checkpoint == "auto" else options.checkpoint  # computed again, whatever fits
        submodules(self._parts.trainer.lightning_module, self._always, "checkpoint=")
        if options.checkpoint and ranks.checkpoints_itself(self._parts.trainer):
            raise UserError(
                f"checkpoint={options.checkpoint!r} and activation_checkpointing_policy= of "
                f"{type(self._parts.trainer.strategy).__name__} both compute submodules again: give one of them."
            )

    @property
    def chosen(self) -> Recomputed | None:
        """What was chosen to be computed again, so that the fewest samples fit; ``None`` if nothing was."""
        return None if self.found.result is None else self.found.result.recomputed

    @property
    def fits(self) -> Fits | None:
        """What a whole window takes if it fits in one pass, so that no limit was looked for; else ``None``."""
        found = self.found.fits
        if found is None:
            return None
        each = self._data.windows.planner.samples_of_unit
        return replace(found, samples=found.samples * each, tried=found.tried * each)

    def hardware(self) -> str:
        """Describe the hardware; a limit found on other hardware is not used."""
        return describe_hardware(self._parts.trainer, self._options.budget)

    # --- questions -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Find the limit as training begins; a restored run falls to what errors had left of it."""
        restored = self._restored()
        if self._parts.request.micro_batch is None:
            samples = self._find(self._most_useful(), restored, self._setup(begins=True))
        else:
            self.recomputed.use(self._always)
            samples = self._parts.request.micro_batch_in_place_of(NO_LIMIT)
        limit = self._parts.limit
        limit.use(samples)
        if restored is not None and restored.limit is not None:
            limit.fall(restored.limit)
        self._use_found()

    def begin_window(self) -> None:
        """Follow a schedule that makes windows larger within an epoch."""
        may_grow = self._parts.request.by_window is not None and not self._is_wanted_at_once
        if may_grow and not self._parts.place.skips_backward:
            self.follow_windows()

    def follow_windows(self) -> None:
        """Look for the limit again if the window that comes next is larger than any that was asked about.

        Ranks agree on it first.
        """
        if self._parts.request.micro_batch is not None:
            return
        of_window = self._most_useful()
        # All ranks return here, or none, which reach a collective below: in the loader they have asked about the same
        # number, and in the step a window never needs more than a batch, whose size is the same.
        if of_window <= self._asked:
            return
        limit = self._parts.limit
        if not self._parts.shares.differ:
            limit.agree()
        is_bounded_by_memory = limit.has_fallen or limit.samples < self._asked  # less was found than was asked about
        of_epoch = self._data.windows.planner.useful_limit(self._parts.place.epochs[:1])
        ahead = max(of_window, min(2 * of_window, of_epoch))  # twice as many, so that a ramp asks rarely
        if is_bounded_by_memory:  # a larger window has no larger passes
            self._asked = ahead
            return
        limit.use(self._find(ahead, None, self._setup(begins=False)))
        self._use_found()

    def below(self, failed: int) -> int | None:
        """Look for the limit below a pass that ran out of memory, if only a whole window was asked about before.

        The cache may know it from another run; the entry that this search writes is removed by ``Remedies.apply``. On
        several ranks one does not look, because the others wait for it.
        """
        if self.found.fits is None or self._parts.trainer.world_size > 1:
            return None
        setup = self._setup(begins=False)
        search = partial(find_limit, setup, self._options, high=setup.batches.at_most(failed))
        found: Found = attempt(search, lambda _: True).result or Found()
        if found.result is not None and found.result.limit >= failed:  # memory was short for a moment
            found = found._replace(result=None)
        self.found = found
        self._use_chosen()
        return None if found.result is None else found.result.limit

    @cached_property
    def all_recomputable(self) -> tuple[str, ...]:
        """All submodules that can be computed again, found once a fit, by passes in which nothing is computed again."""
        in_use = self.recomputed.names
        self.recomputed.use(())
        try:
            return recomputable(self._setup(begins=False))
        finally:
            self.recomputed.use(in_use)

    def forget_limit(self) -> None:
        """Let the next run probe again, because memory has run out in this one."""
        if self.found.cache_key is not None:
            forget(self.found.cache_key)

    # --- answers -------------------------------------------------------------------------------

    def _restored(self) -> RunState | None:
        """Return what a checkpoint has kept, if all ranks run on the hardware of its first rank, and with one limit."""
        restored = self._parts.progress.restored
        if restored is None or self._parts.shares.differ:
            return None
        is_same = restored.hardware == self.hardware()
        return restored if ranks.smallest_over_ranks(self._parts.trainer, int(is_same)) else None

    def _most_useful(self) -> int:
        """Return the largest micro-batch of the window that comes next; of all, if the limit is wanted at once."""
        planner = self._data.windows.planner
        place = self._parts.place
        if self._is_wanted_at_once:
            return planner.useful_limit(place.epochs)
        of_epoch = planner.useful_limit(place.epochs[:1])
        position = self._parts.progress.position_in(place.epoch)
        asked = self._parts.request.count_at(
            place.epoch, step=position.steps_before + position.windows_done, samples=position.samples_seen
        )
        if asked is None:
            return of_epoch
        return min(of_epoch, ceil_div(asked, planner.recipe.world_size))

    def _setup(self, *, begins: bool) -> TrainingSetup:
        """Return the training as trial steps run it."""
        windows = self._data.windows
        epoch = self._parts.place.epoch
        shares = self._parts.shares
        chunked = self._parts.limit.chunked
        rank_samples = windows.planner.effective(epoch)  # a rank may have nearly all, if shares differ
        if not shares.differ:
            rank_samples = ceil_div(rank_samples, ranks.data_ranks(self._parts.trainer)[0])
        return TrainingSetup(
            self._parts.trainer,
            windows.trial_batches(epoch),
            rank_samples=rank_samples // windows.planner.samples_of_unit,
            kept=self._kept,
            chunks=None if chunked is None else chunked.size,
            multiple=self._parts.request.multiple,
            alone=shares.differ,
            sizes=windows.planner.source.sizes,
            begins=begins,
        )

    def _find(self, useful: int, restored: RunState | None, setup: TrainingSetup) -> int:
        """Return the limit for windows of which passes of up to so many ``useful`` samples may be made."""
        self._asked = useful
        if self.found.result is None:  # after a probe, the submodules that it has chosen stay
            self.recomputed.use(self._always)
        tried = setup.batches.at_most(useful)  # a trial batch may have fewer
        if not setup.alone:  # first batches differ by rank
            tried = ranks.smallest_over_ranks(self._parts.trainer, tried)
            if not tried:  # a collate function has left nothing of a first batch: none is tried
                return self._parts.request.micro_batch_in_place_of(useful)
        fits = self._recall(tried, restored) or self._ask(tried, setup)
        return self._parts.request.micro_batch_in_place_of(self._limit_of_all(fits, tried=tried, useful=useful))

    def _limit_of_all(self, fits: int, *, tried: int, useful: int) -> int:
        """Turn the result of a trial, that ``fits`` of ``tried`` samples fit, into the limit of all batches."""
        if fits == NO_LIMIT:  # batches cannot be cut
            return NO_LIMIT
        all_fit = fits >= tried
        if self._data.windows.planner.source.first_may_be_smaller:
            if all_fit and self._parts.limit.chunked is None:
                return NO_LIMIT  # larger batches run as they are, and are cut after an error
            return min(fits, tried)
        # A window that fits as it is shows no bound, so all that is useful may run: a collate function may have dropped
        # samples of this one, which other batches have.
        shows_no_bound = all_fit and self.found.result is None
        return useful if shows_no_bound else min(fits, useful)  # what was recalled may be for larger windows

    def _recall(self, tried: int, restored: RunState | None) -> int | None:
        """Return the limit that a checkpoint has kept; ``None`` if there is none, or if it does not hold here."""
        if restored is None or restored.probe is None:
            return None
        known = restored.probe
        by_speed = self._options.objective == "throughput"
        fastest = known.fastest if by_speed else None
        if by_speed and fastest is None:  # nothing was timed
            return None
        may_recompute = known.recomputed is None or self._options.checkpoint == "auto"
        # By its own budget: on the same hardware it holds, however much is free now.
        if not may_recompute or not still_holds(known, known.budget_bytes, tried, self._parts.request.multiple):
            return None
        self.found = Found(result=replace(known, fastest=fastest, source="checkpoint", steps=0, seconds=0.0))
        return fastest or known.limit

    def _ask(self, tried: int, setup: TrainingSetup) -> int:
        """Return the limit that trial steps show; a program for which they fail trains as its recipe says."""
        if memory_grows_over_steps(self._parts.trainer) and self._options.budget is None:
            return tried  # whole batches, until an error
        try:
            self.found = self._probe(tried, setup)
        except LayoutError:
            # Batches that cannot be cut run as they are, unless they are to be smaller.
            if self._options.budget is not None or self._parts.request.most is not None:
                raise
            return NO_LIMIT
        except FailedOnRanksError as error:
            return self._limit_without_probe(error.args[0])
        except Exception as error:
            if may_be_out_of_memory(error) or isinstance(error, UserError) or self._parts.trainer.world_size > 1:
                raise  # ranks probe together or not at all
            return self._limit_without_probe(error)
        if self.found.result is None:
            return tried
        return self.found.result.fastest or self.found.result.limit

    def _limit_without_probe(self, error: Exception) -> int:
        """Warn that a trial step has failed; return the micro-batch of the recipe."""
        recipe = min(self._asked, self._data.windows.planner.recipe.batch_size)
        said = str(error).partition("\n")[0].rstrip(".")  # a data worker's has a traceback below
        rank_zero_warn(
            "The probe found no limit, because a trial step, in which the probe records memory, ended in "
            f"{type(error).__name__}: {said}. Training uses micro-batches of the recipe, "
            f"{recipe * self._data.windows.planner.samples_of_unit} samples; give micro_batch_size=… to choose."
        )
        return recipe

    def _probe(self, tried: int, setup: TrainingSetup) -> Found:
        """Probe; if not one sample fits, and that is asked for, with submodules computed again.

        A whole window comes first, if that may be enough.
        """
        # Later in training, ranks with limits of their own ask one by one.
        ranks_ask_together = setup.begins or not setup.alone
        if self._parts.trainer.world_size > 1 and ranks_ask_together:
            _require_cut_on_all_ranks(self._parts.trainer, setup.batches)
        known_chosen = self.chosen
        self.found = self.found._replace(fits=None)  # also if the search fails
        search = partial(find_limit, setup, self._options, high=tried)
        try:
            whole_first = known_chosen is None and not self._is_wanted_at_once
            return search(recomputed=known_chosen, whole_first=whole_first)
        except DoesNotFitError as error:
            if self._options.checkpoint != "auto" or self.recomputed.names:
                raise
            without = error.with_traceback(None)
        chosen = choose_recomputed(setup, self._options, without)
        self.recomputed.use(chosen.names)
        return search(recomputed=chosen)

    def _use_found(self) -> None:
        """Compute again what was chosen, and cut by the sizes of samples within the limit."""
        self._use_chosen()
        sizes = self._data.windows.planner.source.sizes
        if sizes is None:
            return
        most = self._parts.request.most or NO_LIMIT
        probe = self.found.result
        if probe is None or probe.sizes is None:
            longest_that_fit = self._parts.limit.samples
            limits = SizeLimits(longest_that_fit * sizes.largest, most)
        else:
            longest_that_fit = probe.limit
            limits = replace(probe.sizes, samples=min(most, probe.sizes.samples))
        sizes.set_limits(longest_that_fit, limits)

    def _use_chosen(self) -> None:
        if self.chosen is not None:
            self.recomputed.use(self.chosen.names)


def _require_cut_on_all_ranks(trainer: Any, batches: TrialBatches) -> None:
    """Raise an error on all ranks if one cannot cut its batches: trials end in votes, which need all ranks.

    It is a ``LayoutError`` on all ranks if each of the errors is one; then training goes on.
    """

    def cut() -> None:
        if not batches.empty:
            batches.make(min(2, batches.most), lambda batch: batch)

    failure = attempt(cut, lambda _: True).failure  # whatever it was, the other ranks wait for this one
    is_of_layout = isinstance(failure, LayoutError)
    if ranks.smallest_over_ranks(trainer, int(failure is None)):
        return
    if ranks.smallest_over_ranks(trainer, int(failure is None or is_of_layout)):
        raise failure or LayoutError("The batches of another rank cannot be cut into samples.")
    if failure is None or is_of_layout:
        raise RuntimeError("Cutting a batch ended in an error on another rank, which shows it.")
    raise failure
