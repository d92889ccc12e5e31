"""Leave out samples that fit in no way (``on_oom="skip"``): their passes run on nothing and weigh nothing.

A window's passes have one sample each once one of them has failed, so the index of a pass in its window names the
sample, however often the window begins again. Ranks stay in step: the pass runs, with a loss of zero.

``Gradients`` lets their passes run so, and knows which pass runs.

Tested in tests/integration/test_left_out.py and tests/integration/test_checkpoint.py.
"""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_prefixed_message

from lightning_ga.errors import UserError
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.plan.config import Options

MOST_IN_A_ROW = 10  # samples that may be left out, until a window is whole again
ONE_IN = 100  # samples of the epoch, one may be left out


class LeftOut:
    """Chooses the samples of the running window that are left out, and lists all; made on all ranks together."""

    def __init__(self, parts: FitParts, options: Options, data: TrainingData) -> None:
        self._parts = parts
        self._data = data
        self._in_row = 0  # left out since a window was whole
        self._by_epoch: Counter[int] = Counter()  # how many were left out in each
        self._folder = Path()
        if options.on_oom == "skip":
            self._folder = Path(parts.trainer.log_dir or parts.trainer.default_root_dir)  # ranks ask for it together

    def begin_window(self) -> None:
        """Begin another window, of which no sample is left out so far."""
        if not self._parts.gradients.left_out:
            self._in_row = 0
        self._parts.gradients.left_out.clear()

    def add(self) -> bool:
        """Leave out the sample whose pass has failed; return whether one is known to have.

        Raises:
            UserError: If too many are left out.
        """
        index_in_window = self._parts.gradients.running
        if index_in_window is None or index_in_window in self._parts.gradients.left_out:
            return False
        self._parts.gradients.left_out.add(index_in_window)
        epoch, window = self._parts.progress.window
        self._in_row += 1
        self._by_epoch[epoch] += 1
        row = {
            "epoch": epoch,
            "window": window,
            "place": index_in_window,
            "index": self._data.windows.index_of(index_in_window),
            "size": self._parts.gradients.shapes,
            "rank": self._parts.trainer.global_rank,
        }
        self._write(row)
        samples = self._data.windows.planner.samples_of_epoch(epoch)
        most = None if samples is None else ceil_div(samples, ONE_IN)
        if self._in_row > MOST_IN_A_ROW or (most is not None and self._by_epoch[epoch] > most):
            raise UserError(
                f"{self._in_row} samples in a row and {self._by_epoch[epoch]} of this epoch did not fit and were left "
                f"out, more than {MOST_IN_A_ROW}, or one in {ONE_IN}: raise memory_budget, or make samples smaller; "
                "skipped.csv lists them."
            )
        said = ", ".join(f"{name} {value}" for name, value in row.items())
        print(rank_prefixed_message(f"AutoAccumulate: a sample is left out: {said}.", self._parts.trainer.global_rank))
        return True

    def _write(self, row: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "skipped.csv").open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*row])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
