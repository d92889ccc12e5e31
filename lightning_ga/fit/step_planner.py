"""How many of the user's own batches make a window if the step cuts, and the pieces of each batch.

Tested in tests/integration/test_schedules.py and tests/differential/test_differential.py.
"""

from lightning_ga.errors import UserError
from lightning_ga.fit.limit import NO_LIMIT
from lightning_ga.fit.parts import FitParts
from lightning_ga.loading.step_source import StepSource
from lightning_ga.plan.accumulation import AccumulationPlan, ceil_div, in_chunks_of, plan_in_step
from lightning_ga.plan.recipe import Recipe
from lightning_ga.plan.windows import GrowingWindows


class StepPlanner:
    """Plans windows by what was asked for and what fits."""

    def __init__(self, parts: FitParts, source: StepSource) -> None:
        self._parts = parts
        self.source = source
        self._plan: AccumulationPlan | None = None

    def use(self, source: StepSource) -> None:
        """Plan windows of a loader that is loaded again."""
        source.follow(self.source)
        self.source = source

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples of a batch, of the largest loader; 1 before one is seen, if the loader does not say it."""
        return self.source.batch_size or 1

    @property
    def units(self) -> int:
        """The parts into which a batch can be cut, each with samples of every loader: what limits and pieces count."""
        return self.source.units or 1

    @property
    def samples_of_unit(self) -> int:
        """Samples of the largest loader in a unit."""
        return self.batch_size // self.units

    @property
    def recipe(self) -> Recipe:
        """The batches as the user wrote them."""
        return Recipe(self.batch_size, self.source.recipe_factor, self.source.world_size)

    def effective(self, epoch: int) -> int:
        """Return the largest effective batch of an epoch."""
        return (
            self._parts.request.effective_batch(epoch, self.batch_size, self.source.world_size) or self.recipe.effective
        )

    def samples_of_epoch(self, epoch: int) -> int | None:
        """Return the samples of any epoch, over all ranks; ``None`` if that is not known."""
        batches = self._parts.place.loop_batches_of_epoch
        if batches is None or self.source.batch_size is None:
            return None
        return self.recipe.samples_of(batches)

    def useful_limit(self, epochs: range) -> int:
        """Return the largest piece of a batch, in units, that these epochs can use."""
        request = self._parts.request
        high = request.useful_limit(epochs, recipe=self.recipe.effective, total=None, world_size=self.source.world_size)
        return max(1, min(high, request.micro_batch_in_place_of(self.units)))

    def steps_of(self, epoch: int, *, steps: int, samples: int) -> tuple[int, int] | None:
        """Return steps and samples of an epoch that begins after so many; ``None`` if its length is not known.

        Raises:
            UserError: If windows count samples, and no batch has shown yet how many it has.
        """
        batches = self._parts.place.loop_batches_of_epoch
        if batches is None:
            return None
        self._require_known_samples()

        def batches_at(windows_done: int, batches_done: int) -> int:
            samples_done = samples + self.recipe.samples_of(batches_done)
            return self._batches_of_window(epoch, step=steps + windows_done, samples=samples_done)

        growth = self._parts.request.by_window
        if growth is None or growth.is_settled(steps, samples):
            windows = ceil_div(batches, batches_at(0, 0))
        else:
            windows = GrowingWindows(batches, batches_at).count  # whose unit is a batch here, elsewhere a sample
        return windows, self.recipe.samples_of(batches)

    def _require_known_samples(self) -> None:
        request = self._parts.request
        if self.source.batch_size is not None or not request.counts_samples:
            return
        name = "accumulate" if request.is_factor else "effective_batch_size"
        asked = request.by_window or request.schedule(0)
        raise UserError(
            f"How many optimizer steps {name}={asked} makes is not known before training has read a batch: with "
            f"{self.source.why}, the loader does not say how many samples a batch has. To count steps in "
            "configure_optimizers, give accumulate= as a number of the loader's batches, or train on one DataLoader "
            "with batch_size=…."
        )

    # --- plans ---------------------------------------------------------------------------------

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before one is planned."""
        limit = self._parts.limit
        if self._plan is None or not limit.chunked_names or not limit.is_known:
            return self._plan
        return in_chunks_of(self._plan, limit.samples * self.samples_of_unit, limit.chunked_names)

    def plan_next_window(self) -> int:
        """Plan the next window; return how many batches make it."""
        progress = self._parts.progress
        factor = self._batches_of_window(
            progress.position.epoch, step=int(self._parts.trainer.global_step), samples=progress.position.samples_seen
        )
        micro_batch = self._parts.limit.of_pass
        if micro_batch == NO_LIMIT:  # batches run as they are
            micro_batch = self.units
        self._plan = plan_in_step(
            self.units,
            batches=factor,
            micro_batch=micro_batch,
            weight=self.samples_of_unit,
            world_size=self.source.world_size,
            multiple=self._parts.request.multiple,
        )
        return factor

    def _batches_of_window(self, epoch: int, *, step: int, samples: int) -> int:
        """Return how many of the loader's batches make a window that begins after so many steps and samples."""
        request = self._parts.request
        asked = request.count_at(epoch, step=step, samples=samples)
        batches = asked or self.source.recipe_factor
        if asked and not request.is_factor:
            batches = self.source.factor_for(asked)
        whole = self._parts.limit.chunked_names
        if whole and batches > 1:
            raise UserError(
                f"{whole=} needs a window of one batch, and {batches} batches of the loader make one here: let the "
                f"loader yield batches of {batches * self.batch_size} samples."
            )
        return batches
