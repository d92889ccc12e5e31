"""What a fit asks of its windows: the loader cuts them (``loader_windows.py``), or the step (``step_windows.py``).

A window is all samples between two optimizer steps. ``TrainingData`` decides where they are cut, once, when it reads
the loader. Nothing else asks.

Tested in tests/differential/test_differential.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_ga.compat.compiled import CompiledModules
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.compat.step_values import StepValues
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.limit import Limit
from lightning_ga.fit.progress import Progress
from lightning_ga.loading.sample_sizes import SampleSizes
from lightning_ga.loading.source import LoaderSource
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches
from lightning_ga.plan.accumulation import AccumulationPlan, require_effective_batch, require_few_chunks
from lightning_ga.plan.config import Request
from lightning_ga.snapshot.kept_batch import KeptBatch


@dataclass(frozen=True, slots=True)
class FitParts:
    """The parts of a fit that its windows read."""

    request: Request
    limit: Limit
    progress: Progress
    gradients: Gradients
    values: StepValues
    compiled: CompiledModules
    cutter: Callable[[], BatchCutter]  # of the batches that the step gets
    first_batch: Callable[[], Any]  # the next batch of the loop, on the host, which the loop still gets
    leaves_out: bool  # whether samples that do not fit may be left out


class Windows(Protocol):
    """The windows of a fit, an epoch at a time."""

    in_step: bool  # whether the step cuts

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before an epoch is planned."""

    # --- data ----------------------------------------------------------------------------------

    def use(self, source: LoaderSource | StepSource) -> None:
        """Use a loader that is loaded again; refuse one that would be cut elsewhere."""

    def setting_up(self) -> AbstractContextManager[None]:
        """Return a context in which the loop sets up its data, in batches of the recipe."""

    def data_are_set_up(self, loader: Any) -> None:
        """Follow the loop's set-up; the ``loader`` is the user's."""

    def begin_training(self) -> bool:
        """Adopt the loop's position, before the probe; return whether a run continues within an epoch."""

    def kept_order(self) -> str | None:
        """Return the order of the running epoch for a checkpoint, if nothing else gives it again."""

    def trial_batches(self, epoch: int) -> TrialBatches:
        """Return the source of batches for probe and measurement."""

    @property
    def sizes(self) -> SampleSizes | None:
        """The sizes of samples, if windows are cut by these."""

    @property
    def varies(self) -> bool:
        """Whether batches may be larger than the first."""

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def several_passes(self) -> bool:
        """Whether a window runs in several passes, or its pass in several chunks."""

    @property
    def recipe_effective(self) -> int:
        """The recipe's effective batch: batch size × factor × ranks."""

    @property
    def micro_batch(self) -> int:
        """The micro-batch that ``accumulate=`` multiplies: that of the recipe while the limit is not known."""

    def effective(self, epoch: int) -> int:
        """Return the largest effective batch of an epoch."""

    def useful_limit(self, epochs: range) -> int:
        """Return the largest micro-batch that these epochs can use."""

    def steps(self, epochs: range) -> int | None:
        """Count the optimizer steps of these epochs; ``None`` if that is not known."""

    # --- windows -------------------------------------------------------------------------------

    def begin_epoch(self, number: int) -> None:
        """Cut an epoch for training and set the loop up for it, once."""

    def patches(self, exchange: AnyExchange | None) -> AbstractContextManager[None]:
        """Return a context in which the loop runs these windows."""

    def begin_reading(self, *, same_epoch: bool) -> None:
        """Let the loop begin its first epoch, at the window that comes next."""

    def begin_window(self) -> None:
        """Set the factor of the window that the loop has come to, and what is due after it."""

    def weigh(self, batch: Any, position: int) -> None:
        """Weigh the loop's next batch, at a position in its window, unless its pieces are weighed one by one."""

    @property
    def is_over(self) -> bool:
        """Whether the loop's running batch is the last of its window."""

    def end_window(self) -> None:
        """Note that a window is done."""

    # --- errors --------------------------------------------------------------------------------

    def index_of(self, place: int) -> Any:
        """Return the index in the dataset of the only sample of a pass of the running window; ``None`` if not known."""

    @property
    def keeps(self) -> Callable[[Any], None] | None:
        """What gets each batch of the loop before anything changes it; ``None`` if batches are not needed again."""

    @property
    def batches(self) -> Sequence[KeptBatch]:
        """The batches of the window, as ``keeps`` got them."""

    def can_read_again(self, batches_before: int) -> bool:
        """Return whether the samples of a failed pass can be read again; so many batches were kept before it."""

    @property
    def largest_pass(self) -> int:
        """The most samples of a pass of the running batch or window."""

    def begin_again(self) -> None:
        """Plan the same windows with smaller micro-batches, and move the loop to the start of the running one."""

    # --- words ---------------------------------------------------------------------------------

    def how_cut(self) -> str:
        """Return what a user has to know beside the plan; empty if nothing."""

    def advice(self, epochs: range) -> str:
        """Return a warning about the sizes that were asked for; empty if there is none."""

    def close(self) -> None:
        """Give the loop back what the user wrote."""


def require_possible(request: Request, epochs: range, micro_batch: int | None, world_size: int) -> None:
    """Refuse a schedule that would fail in a later epoch, before any work is lost."""
    for effective in filter(None, map(request.effective, epochs)):
        require_effective_batch(effective, world_size)
        if micro_batch is not None:
            require_few_chunks(effective, micro_batch, world_size)
