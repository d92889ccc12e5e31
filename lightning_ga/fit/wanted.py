"""The user's request on the data at hand: effective batches of epochs and windows, and numbers of optimizer steps."""

from dataclasses import dataclass

from lightning_ga.errors import UserError
from lightning_ga.loading.source import LoaderSource
from lightning_ga.loading.step_source import StepSource
from lightning_ga.plan.accumulation import require_effective_batch, require_few_chunks
from lightning_ga.plan.config import Request
from lightning_ga.plan.schedule import Growth


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request on a source of data."""

    request: Request
    source: LoaderSource | StepSource
    world_size: int
    initial_micro_batch: int | None = None  # the micro-batch that ``accumulate=`` multiplies, once the limit is known

    @property
    def recipe_effective(self) -> int:
        """The recipe's effective batch: batch size × factor × ranks."""
        return self.source.recipe_effective() or self.source.settings.recipe_factor * self.world_size

    @property
    def micro_batch(self) -> int:
        """The micro-batch that ``accumulate=`` multiplies: that of the recipe while the limit is not known."""
        return self.initial_micro_batch or self.request.capped(self.source.batch_size or 1)

    def effective(self, epoch: int) -> int:
        """Return the largest effective batch of an epoch."""
        asked = self.request.effective_batch(epoch, self.micro_batch, self.world_size) or self.recipe_effective
        return self.source.within_epoch(asked, epoch) if isinstance(self.source, LoaderSource) else asked

    def effective_or_growth(self, epoch: int, *, steps: int, samples: int) -> int | Growth:
        """Return the effective batch, or its growth, in an epoch that begins after so many steps and samples."""
        return self.request.growth(self.micro_batch, self.world_size, steps, samples) or self.effective(epoch)

    def batches_of_window(self, epoch: int, *, step: int, samples: int, whole: tuple[str, ...] = ()) -> int:
        """Return how many of the loader's batches make a window that begins after so many steps and samples."""
        source, schedule, request = self.source, self.request.by_window, self.request
        assert isinstance(source, StepSource)
        effective, factor = request.effective(epoch), request.factor(epoch)
        if schedule is not None:
            count = schedule.at(step, samples)
            effective, factor = (count, None) if schedule is request.effective else (None, count)
        found = source.settings.recipe_factor if factor is None else factor
        found = found if effective is None else source.factor_for(effective, self.world_size)
        if whole and found > 1:
            raise UserError(
                f"{whole=} needs a window of one batch, and {found} batches of the loader make one here: let the "
                f"loader yield batches of {found * (source.batch_size or 1)} samples."
            )
        return found

    def useful_limit(self, epochs: range) -> int:
        """Return the largest micro-batch that these epochs can use."""
        source = self.source
        total = source.total() if isinstance(source, LoaderSource) else None
        high = self.request.useful_limit(epochs, recipe=self.recipe_effective, total=total, world_size=self.world_size)
        if isinstance(source, StepSource):
            high = min(high, self.request.capped(source.batch_size or 1))
        return max(1, high)

    def check(self, epochs: range) -> None:
        """Refuse a schedule that would fail in a later epoch, before any work is lost."""
        for effective in filter(None, map(self.request.effective, epochs)):
            require_effective_batch(effective, self.world_size)
            if self.initial_micro_batch is not None:
                require_few_chunks(effective, self.initial_micro_batch, self.world_size)

    def steps(self, epochs: range, max_steps: int, *, batches: int | None) -> int | None:
        """Count the optimizer steps of a training; ``None`` if that is not known.

        ``batches`` is the number of the loader's batches in an epoch, if the step cuts them.
        """
        source, steps, samples = self.source, 0, 0
        for epoch in epochs:
            if isinstance(source, LoaderSource):
                more, seen = source.steps_of(epoch, self.effective_or_growth(epoch, steps=steps, samples=samples))
                steps, samples = steps + more, samples + seen
                continue
            left = batches
            if left is None or (source.batch_size is None and self.request.counts_samples):
                return None
            while left > 0:
                factor = self.batches_of_window(epoch, step=steps, samples=samples)
                samples += min(factor, left) * (source.batch_size or 1) * self.world_size
                steps, left = steps + 1, left - factor
        return steps if max_steps == -1 else min(steps, max_steps)
