"""What a window does differently once memory has run out in it.

Its passes become smaller. If one sample alone does not fit, the window computes submodules again
(``checkpoint="auto"``), or leaves that sample out (``on_oom="skip"``).

Tested in tests/integration/test_checkpoint.py and tests/integration/test_fits.py.
"""

from collections import deque
from typing import NamedTuple

from lightning_ga.fit.left_out import LeftOut
from lightning_ga.fit.limit_search import LimitSearch
from lightning_ga.fit.messages import give_up
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.training_data import Windows
from lightning_ga.memory.oom import is_ambiguous_out_of_memory
from lightning_ga.plan.accumulation import halved
from lightning_ga.plan.config import Options

# If one sample did not fit in MANY_FAILED of the last AMONG windows, later windows begin as these ended.
MANY_FAILED = 3
AMONG = 30


class Remedy(NamedTuple):
    """What a window does differently when it begins again."""

    before: int  # samples of the largest pass that has failed
    after: int  # that passes may have from here on, unless a search finds more; as before with one of the last remedies
    lowers_limit: bool = False


class Remedies:
    """Chooses the remedy, and takes the last ones back.

    The window after one in which a sample did not fit begins as that window had begun, unless there were many.
    """

    def __init__(
        self, parts: FitParts, options: Options, search: LimitSearch, left_out: LeftOut, windows: Windows
    ) -> None:
        self._parts = parts
        self._search = search
        self._left_out = left_out
        self._windows = windows
        self._may_recompute = options.checkpoint == "auto"
        self._window: tuple[int, int] | None = None  # the running one, as ``Progress`` names it
        self._number = 0  # of the running window, in this fit
        self._limit_before = self._parts.limit.mark()  # as the running window began
        self._names_before = search.recomputed.names  # of what it computed again as it began
        self._failed: deque[int] = deque(maxlen=MANY_FAILED)  # numbers of windows in which one sample did not fit

    def begin_window(self) -> None:
        """Begin a window; nothing happens if it begins again after an error."""
        self._parts.gradients.running = None
        window = self._parts.progress.window
        if window == self._window:
            return
        self._window = window
        self._left_out.begin_window()
        self._number += 1
        self._limit_before = self._parts.limit.mark()
        self._names_before = self._search.recomputed.names

    def end_window(self) -> None:
        """Take back what the window has made different because one sample did not fit, unless there were many.

        It is taken back before ranks agree on limits, and before a checkpoint keeps them.
        """
        are_many = len(self._failed) == MANY_FAILED and self._number - self._failed[0] < AMONG
        if self._number in self._failed and not are_many:
            self._parts.limit.go_back(self._limit_before)
            self._search.recomputed.use(self._names_before)

    def choose(self, failed: int, failure: Exception) -> Remedy:
        """Return the remedy after a pass of ``failed`` samples has run out of memory; one of the last applies at once.

        Raises:
            Exception: If one sample has failed, and no remedy is left: the failure, or a ``UserError``.
        """
        fits = halved(failed)
        if fits is not None:
            return Remedy(failed, fits, lowers_limit=True)
        remedy = None
        if not is_ambiguous_out_of_memory(failure):
            remedy = self._last_remedy()
        if remedy is None:
            give_up(self._parts.trainer, "training", failure, self._parts.limit.unit)
        return remedy

    def apply(self, remedy: Remedy) -> int:
        """Lower the limit if that is the remedy, to what a search finds; return the samples that passes may have."""
        fits = remedy.after
        if remedy.lowers_limit:
            fits = self._search.below(remedy.before) or fits
            self._parts.limit.fall(fits)
        self._search.forget_limit()
        return fits

    def fall(self, samples: int) -> None:
        """Lower the limit, here and in later runs."""
        self._parts.limit.fall(samples)
        self._search.forget_limit()

    def _last_remedy(self) -> Remedy | None:
        """Return what is left once a pass is one sample, or one of the longest; ``None`` if nothing is.

        Passes of several short samples become smaller. Else the running window computes again all that can be, or
        leaves out the sample.
        """
        of_short_samples = self._windows.halve_passes_of_short_samples()
        if of_short_samples is not None:
            return Remedy(*of_short_samples)
        helps = (self._may_recompute and self._recompute_all()) or self._left_out.add()
        if not helps:
            return None
        if self._number not in self._failed:
            self._failed.append(self._number)
        return Remedy(before=1, after=1)

    def _recompute_all(self) -> bool:
        """Compute again all that can be; return whether that is more than before."""
        every = self._search.all_recomputable  # shown by isolated passes: what has failed may be undone later
        recomputed = self._search.recomputed
        if not every or recomputed.names == every:
            return False
        recomputed.use(every)
        return True
