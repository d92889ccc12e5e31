"""Find out how a fit may cut: the largest micro-batch, whether cutting is exact; lower it if memory runs out."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import closures, loops, ranks
from lightning_ga.errors import UserError
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.place import effective_batch, recipe_micro_batch
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.loading.sized import Sized, SizedBatches, SizedSource
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory
from lightning_ga.plan.checkpoint import RunState
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.lengths import SizeLimits
from lightning_ga.plan.planned_device import current_device
from lightning_ga.plan.records import ProbeResult, lowered, still_holds
from lightning_ga.probe.cache import hardware, remember
from lightning_ga.probe.planned.estimate import estimate
from lightning_ga.probe.training import hooks_apart
from lightning_ga.probe.trials import StepCut, TrainingSetup, probe

NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class _Search:
    """What to search for."""

    high: int  # largest micro-batch that is of use
    rank_samples: int  # samples of a window on one rank
    total: int | None  # samples of the epoch over all ranks; ``None`` if that is not known
    recipe_batch: int  # samples of the recipe's batches on one rank


class TrainingLimit:
    """The largest micro-batch of one fit; once found, it only falls, unless batches grow."""

    def __init__(self, trainer: Any, request: Request, options: Options, engine: Engine, data: TrainingData) -> None:
        self._trainer, self._request, self._options, self._engine = trainer, request, options, engine
        self._data = data
        self.most: int | None = None  # samples of one, or of a chunk with ``whole=``; none before that is known
        self.probe: ProbeResult | None = None  # what was found; none if no probe was needed
        self._high: int | None = None  # the largest micro-batch that was of use when the limit was looked for
        self._sizes: SizedBatches | None = None  # of samples that ready-made batches show
        self._kind: Mapping[str, Any] | None = None  # of step, as the cache describes it; none without a cache

    @property
    def micro_batch(self) -> int | None:
        """The most samples of a micro-batch; none before that is known."""
        return self.most if self.most is None or self._engine.chunked is None else NO_LIMIT

    def hardware(self) -> str:
        """Return what the limit is found on; on anything else it is looked for again."""
        return hardware(self._trainer, self._options.budget)

    def begin(self, epoch: int, restored: RunState | None) -> None:
        """Find out how batches are cut, how large they may be, and whether cutting is exact."""
        source, reader, exactness = self._source, self._engine.reader("training"), self._data.exactness
        if source.streams and (source.cut_in_step or self._options.on_oom == "split"):
            with hooks_apart(self._trainer):  # before training reads the stream: later its batches are gone
                for on_host in (True, False):
                    reader.look(on_host=on_host)
        chunked = self._engine.chunked
        if source.cut_in_step or chunked is not None:  # the probe needs to know how batches are cut
            limit = source.recipe.largest_batch(epoch)
            exactness.measure(source, reader, epoch=epoch, limit=limit, chunked=chunked)
        limit = self._find(epoch, restored)
        if current_device() is not None:
            return
        self._refuse_what_cannot_be_cut(epoch)
        if not exactness.is_measured:
            exactness.measure(source, reader, epoch=epoch, limit=limit, chunked=chunked)

    def cuts(self, epoch: int) -> bool:
        """Return whether batches of the recipe have to be cut, or may have to be, or may be faster in pieces."""
        limit, sizes = self.micro_batch, None if self.probe is None else self.probe.sizes
        by_cost = sizes is not None and sizes.pass_cost is not None
        return limit is not None and (by_cost or limit < self._source.largest_extent(epoch))

    def _refuse_what_cannot_be_cut(self, epoch: int) -> None:
        """Refuse batches that are too large and cannot be cut into samples, before any work is lost."""
        source = self._source
        if not source.cut_in_step or not self.cuts(epoch):
            return
        source.check_cut()
        with hooks_apart(self._trainer):
            self._engine.reader("training").check(lambda: source.samples_at(0), on_host=True)
        if self._data.why_in_step:
            rank_zero_info(
                f"AutoAccumulate cuts batches in the training step, where they are too large. {self._data.why_in_step}"
            )

    @property
    def _source(self) -> TrainingSource:
        return self._data.source

    def _find(self, epoch: int, restored: RunState | None) -> int:
        """Find the limit: given by the user, kept by a checkpoint, remembered, estimated or probed for."""
        kept = None
        if restored is not None:  # it holds if all ranks run on the hardware of the checkpoint's first rank
            same = restored.hardware == self.hardware()
            kept = restored if ranks.smallest_over_ranks(self._trainer, int(same)) else None
        found = self._looked_for(epoch, kept)
        if kept is not None and kept.limit is not None:  # memory ran out in that run
            self._engine.lower("training", kept.limit)
            found = found if self._data.keeps_sizes else min(found, kept.limit)
        self.most = found
        self._keep_sizes()
        return found

    def _keep_sizes(self) -> None:
        """Let windows be cut by samples × longest, as the probe found or for so many of the longest."""
        found, most, of, sized = self.probe, self._request.most or NO_LIMIT, self.micro_batch, self._sized(self._source)
        if sized is None or of is None:
            return
        if found is None or found.sizes is None:
            sized.keep_within(SizeLimits(of * sized.longest, most), of)
        else:
            sized.keep_within(replace(found.sizes, samples=min(most, found.sizes.samples)), found.limit)

    def _sized(self, source: TrainingSource) -> Sized | None:
        """Return what knows the sizes of samples, if windows or batches are cut by these."""
        if isinstance(source, SizedSource) or self._options.size_of is None:
            return source if isinstance(source, SizedSource) else None
        if self._sizes is None or self._sizes.source is not source:
            self._sizes = SizedBatches(source, self._engine.reader("training"))
        return self._sizes

    def find_more(self, epoch: int) -> None:
        """Look for the limit again if batches have grown beyond all that was of use before, and all of that has fitted.

        Ranks call this together.
        """
        self._keep_sizes()
        found, wanted = self.probe, self._search(epoch).high
        if found is None or self._high is None or not wanted > self._high <= min(found.limit, self.most or 0):
            return
        self._engine.limits.pop("training", None)
        self._find(epoch, None)

    def lower(self) -> None:
        """Run no more samples than proved too much on any rank, and plan so; ranks call this together."""
        limit = ranks.smallest_over_ranks(self._trainer, self._engine.limit("training") or NO_LIMIT)
        if self.most is None or limit >= self.most:
            return
        self._engine.lower("training", limit)
        found = None if self.probe is None else lowered(self.probe, limit)
        if found is not None and self._kind is not None:
            remember(self._kind, found)
        if not ranks.smallest_over_ranks(self._trainer, int(self._data.keeps_sizes)):
            self.most, self.probe = limit, found

    def lower_if_allocator_struggles(self) -> None:
        """Run smaller passes from here on if the allocator struggles with those that are planned."""
        engine, samples = self._engine, self.most or 1
        if not engine.policy.retries or samples == 1 or not engine.allocator.struggles():
            return
        engine.lower("training", max(1, samples * 15 // 16))
        of, than = "samples", ""
        if self._options.size_of is not None:
            of, than = "of the longest samples", " of the longest samples, or as much as these hold"
        warnings.warn(
            f"The allocator had to free its cache to go on with {samples} {of}, which is slow and may end in an "
            f"out-of-memory error: from now on no pass has more than {engine.limit('training')}{than}.",
            stacklevel=2,
        )

    def _looked_for(self, epoch: int, kept: RunState | None) -> int:
        source, device, asked, optimizer = (
            self._source,
            current_device(),
            self._request.micro_batch,
            self._trainer.optimizers[0],
        )
        if asked is not None and device is None:
            return self._request.capped(asked)
        search = self._search(epoch)
        self._high = search.high
        if closures.evaluates_again(optimizer):
            raise UserError(
                f"{type(optimizer).__name__} keeps a history that grows over many steps, so that no trial "
                "of one step shows what it takes: give micro_batch_size=… to do without a probe."
            )
        if self._engine.chunked is None and self._cannot_cut():
            return NO_LIMIT
        if device is not None:
            setup = self._setup(epoch, search)
            self.probe = estimate(setup, device, high=search.high, budget=self._options.budget)
            return self.probe.limit
        known = kept.probe if kept is not None else None
        is_known = known is not None and (known.sizes is not None or self._options.size_of is None)
        if is_known and known is not None and still_holds(known, known.budget_bytes, search.high):
            self.probe = replace(known, source="checkpoint", steps=0, seconds=0.0)
        else:
            self._run_probe(epoch, search)
        if self.probe is None:
            return recipe_micro_batch(source, self._request, epoch)
        return self._of_use(epoch, search, self.probe)

    def _search(self, epoch: int) -> _Search:
        source = self._source
        total, world_size = source.recipe.total(epoch), source.world_size
        total = None if total is None else total * source.sharded_ranks
        recipe_batch = source.largest_batch(epoch)
        epochs = loops.training_epochs(self._trainer)
        recipe = max(source.largest_window(each) or 0 for each in epochs) or source.recipe.effective(epoch)
        high = self._request.useful_limit(epochs, recipe=recipe, total=total, world_size=world_size)
        if source.cut_in_step or source.keeps_groups:
            high = min(high, recipe_batch)
        window = effective_batch(source, self._request, epoch, micro_batch=None) or recipe
        if self._engine.chunked is not None:  # the chunks have to fit beside the outputs for the largest window
            window = max(window, *(self._request.effective(each) or recipe for each in epochs))
            window = window if total is None else min(window, total)
        return _Search(high, -(-window // world_size), total, recipe_batch)

    def _of_use(self, epoch: int, search: _Search, found: ProbeResult) -> int:
        """Return the micro-batch to plan with."""
        source = self._source
        limit = min(search.high, found.fastest or found.limit)
        everything = search.total is not None and limit * source.world_size >= search.total
        if not everything or self._request.factor(epoch) is not None:
            return limit
        # No batch is larger than the epoch, whatever the window may hold.
        share = min(search.rank_samples, search.recipe_batch) if source.cut_in_step else search.rank_samples
        return self._request.capped(max(limit, share))

    def _cannot_cut(self) -> bool:
        """Return whether batches come ready-made and cannot be cut: none of another size can be tried.

        If they have to be cut all the same, that is an error.
        """
        try:
            self._source.check_cut()
        except LayoutError:
            if self._options.budget is not None or self._request.most is not None:
                raise
            return True
        return False

    def _setup(self, epoch: int, search: _Search) -> TrainingSetup:
        source = self._source
        cut = StepCut(self._engine.reader("training"), search.recipe_batch) if source.cut_in_step else None
        order, chunked = source.scan_order(epoch), self._engine.chunked
        return TrainingSetup(
            self._trainer,
            source.user_loader,
            order,
            search.rank_samples,
            self._engine,
            cut if chunked is None else None,
            None if chunked is None else chunked.size,
            self._sized(source),
        )

    def _run_probe(self, epoch: int, search: _Search) -> None:
        """Look for the limit; there is none if the data are empty, or if a trial step fails.

        A failed trial does not end the run: hooks that run later may prepare what the step needs.
        """
        try:
            found = probe(self._setup(epoch, search), self._options, high=search.high)
        except Exception as error:
            memory = is_out_of_memory(error) or is_ambiguous_out_of_memory(error)
            if memory or isinstance(error, UserError) or ranks.is_distributed(self._trainer):
                raise  # ranks probe together or not at all
            rank_zero_warn(
                f"The probe found no limit, as a trial step ended in {type(error).__name__}: {error}. Training goes on "
                "with micro-batches as the recipe has them; give micro_batch_size=… to choose."
            )
        else:
            self.probe, self._kind = found or (None, None)
