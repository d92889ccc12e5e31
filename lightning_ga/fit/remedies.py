"""What a window does differently once memory has run out in it.

Its passes become smaller. The last remedy is for one sample that does not fit alone: the window computes submodules
again (``checkpoint="auto"``), or leaves that sample out (``on_oom="skip"``).

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
    after: int  # that passes may have from here on, unless a search finds more; with the last remedy, as ``before``
    lowers_limit: bool = False  # by ``Remedies.apply``; another remedy was applied as it was chosen


class Remedies:
    """Chooses the remedy; after a window with the last remedy, takes back its limit and what it computes again.

    The next window begins as that one had begun, unless many needed the last remedy. Halved passes of short samples
    stay.
    """

    def __init__(
        self, parts: FitParts, options: Options, search: LimitSearch, left_out: LeftOut, windows: Windows
    ) -> None:
        self._parts = parts
        self._search = search
        self._left_out = left_out
        self._windows = windows
        self._may_recompute = options.checkpoint == "auto"
        self._window: tuple[int, int] | None = None  # the running one, as ``DataProgress`` names it
        self._number = 0  # of the running window, in this fit
        self._limit_before = self._parts.limit.mark()  # as the running window began
        self._names_before = search.recomputed.names  # of what it computed again as it began
        self._failed: deque[int] = deque(maxlen=MANY_FAILED)  # numbers of windows in which one sample did not fit

    def begin_window(self) -> None:
        """Begin a window; if it begins again after an error, only its pass is forgotten."""
        self._parts.gradients.forget_pass()  # an error before the next one is of no sample
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
        """Return the remedy after a pass of ``failed`` samples has run out of memory.

        The limit is lowered by ``apply`` alone. Other remedies are applied here: with ``size_of``, smaller passes of
        short samples; else the last remedy.

        Raises:
            Exception: If one sample has failed, and no remedy is left: the failure, or a ``UserError``.
        """
        fits = halved(failed)
        if fits is not None:
            return Remedy(failed, fits, lowers_limit=True)
        if is_ambiguous_out_of_memory(failure):  # it may mean something else, which no remedy helps
            raise failure
        of_short_samples = self._windows.halve_passes_of_short_samples()
        if of_short_samples is not None:
            return Remedy(*of_short_samples)
        if not self._apply_last_remedy():
            give_up(self._parts.trainer, "training", failure, self._parts.limit.unit)
        return Remedy(before=1, after=1)

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

    def _apply_last_remedy(self) -> bool:
        """Let the running window compute again all that can be, or leave out the sample; return whether it can."""
        helps = (self._may_recompute and self._recompute_all()) or self._left_out.add()
        if helps and self._number not in self._failed:
            self._failed.append(self._number)
        return helps

    def _recompute_all(self) -> bool:
        """Compute again all that can be; return whether that is more than before."""
        every = self._search.all_recomputable  # shown by isolated passes: what has failed may be undone later
        recomputed = self._search.recomputed
        if not every or recomputed.names == every:
            return False
        recomputed.use(every)
        return True
