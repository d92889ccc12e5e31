"""What a window does differently once memory has run out in it.

Its passes become smaller. If one sample alone does not fit, the window computes submodules again
(``checkpoint="auto"``), or leaves that sample out (``on_oom="skip"``).

Tested in tests/integration/test_checkpoint.py and tests/integration/test_fits.py.
"""

from collections import deque

from lightning_ga.fit.left_out import LeftOut
from lightning_ga.fit.limit_search import LimitSearch
from lightning_ga.fit.messages import give_up
from lightning_ga.fit.parts import FitParts
from lightning_ga.memory.oom import is_ambiguous_out_of_memory
from lightning_ga.plan.config import Options
from lightning_ga.plan.piece_sizes import halved

# If one sample did not fit in MANY_FAILED of the last AMONG windows, later windows begin as these ended.
MANY_FAILED = 3
AMONG = 30


class Remedies:
    """Chooses the remedy, and takes the last ones back.

    The window after one in which a sample did not fit begins as that window had begun, unless there were many.
    """

    def __init__(self, parts: FitParts, options: Options, search: LimitSearch, left_out: LeftOut) -> None:
        self._progress = parts.progress
        self._limit = parts.limit
        self._search = search
        self._left_out = left_out
        self._may_recompute = options.checkpoint == "auto"
        self._window: tuple[int, int] | None = None  # the running one, as ``Progress`` names it
        self._number = 0  # of the running window, in this fit
        self._limit_before = self._limit.mark()  # as the running window began
        self._names_before = search.recomputed.names  # of what it computed again as it began
        self._failed: deque[int] = deque(maxlen=MANY_FAILED)  # numbers of windows in which one sample did not fit

    def begin_window(self) -> None:
        """Begin a window; nothing happens if it begins again after an error."""
        self._left_out.forget_pass()
        window = self._progress.window
        if window == self._window:
            return
        self._window = window
        self._left_out.begin_window()
        self._number += 1
        self._limit_before = self._limit.mark()
        self._names_before = self._search.recomputed.names

    def end_window(self) -> None:
        """Take back what the window has made different because one sample did not fit, unless there were many.

        It is taken back before ranks agree on limits, and before a checkpoint keeps them.
        """
        are_many = len(self._failed) == MANY_FAILED and self._number - self._failed[0] < AMONG
        if self._number in self._failed and not are_many:
            self._limit.go_back(self._limit_before)
            self._search.recomputed.use(self._names_before)

    def choose_remedy(self, failed: int, failure: Exception) -> int:
        """Return the limit after a pass of ``failed`` samples has run out of memory; a last remedy keeps it.

        Raises:
            Exception: If one sample has failed, and no remedy is left: the failure, or a ``UserError``.
        """
        fits = halved(failed)
        if fits is not None:
            return fits
        if is_ambiguous_out_of_memory(failure) or not self._apply_last():
            give_up(self._progress.trainer, "training", failure, self._limit.unit)
        return failed

    def lower(self, failed: int, *, at_most: int) -> int:
        """Lower the limit to what a search finds below a pass that ``failed``, else to ``at_most``; return it."""
        fits = at_most
        if fits < failed:
            fits = self._search.below(failed) or fits
        self.fall(fits)
        return fits

    def fall(self, samples: int) -> None:
        """Lower the limit, here and in later runs."""
        self._limit.fall(samples)
        self._search.forget_limit()

    def _apply_last(self) -> bool:
        """Let the running window compute again all that can be, or leave out the sample; return whether one helps."""
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
