"""Leave out samples that fit in no way (``on_oom="skip"``): their passes run on nothing and weigh nothing.

A window's passes have one sample each once one of them has failed, so the index of a pass in its window names the
sample, however often the window begins again. Ranks stay in step: the pass runs, with a loss of zero.

Tested in tests/integration/test_left_out.py and tests/integration/test_checkpoint.py.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_prefixed_message
from torch import Tensor

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.plan.accumulation import ceil_div

MOST_IN_A_ROW = 10  # samples that may be left out, until a window is whole again
ONE_IN = 100  # samples of the epoch, one may be left out


class LeftOut:
    """Owns the samples of the running window that are left out, and the list of all; none unless ``installed``.

    ``Gradients`` counts each pass before its step runs. A step for which no new pass was counted is a trial.
    """

    def __init__(self, parts: FitParts, data: TrainingData) -> None:
        self._trainer = parts.progress.trainer
        self._progress = parts.progress
        self._gradients = parts.gradients
        self._data = data
        self._left_out: set[int] = set()  # indices of passes in the running window
        self.running: int | None = None  # index in its window of the pass that runs; none between two of them
        self._shapes = ""  # of its batch
        self._in_row = 0  # left out since a window was whole
        self._by_epoch: Counter[int] = Counter()  # how many were left out in each
        self._folder = Path()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which steps of samples that are left out return a loss of zero."""
        module = self._trainer.lightning_module
        step = module.training_step
        self._folder = Path(self._trainer.log_dir or self._trainer.default_root_dir)  # ranks ask for it together

        def training_step(batch: Any, *others: Any) -> Any:
            index_in_window = self._gradients.passes - 1
            if index_in_window < 0:  # a trial step, before the window's first pass
                return step(batch, *others)
            is_new_pass = index_in_window != self.running  # else a trial step, after the pass that has failed
            if is_new_pass:
                self.running = index_in_window
                self._shapes = " ".join(str(tuple(tensor.shape)) for tensor in tensors_in(batch))
            if index_in_window not in self._left_out:
                return step(batch, *others)
            self._gradients.weights.leave_out()
            return _nothing(module)

        with shadowed(module, "training_step", training_step):
            yield

    def begin_window(self) -> None:
        """Begin another window, of which no sample is left out so far."""
        if not self._left_out:
            self._in_row = 0
        self._left_out = set()

    def forget_pass(self) -> None:
        """Forget the last pass: the loop's batch is done, or the window begins, maybe again."""
        self.running = None

    def add(self, index_in_window: int | None) -> bool:
        """Leave out the sample whose pass has failed, by its index in the window; return whether one is known to have.

        Raises:
            UserError: If too many are left out.
        """
        if index_in_window is None or index_in_window in self._left_out:
            return False
        self._left_out.add(index_in_window)
        epoch, window = self._progress.window
        self._in_row += 1
        self._by_epoch[epoch] += 1
        row = {
            "epoch": epoch,
            "window": window,
            "place": index_in_window,
            "index": self._data.windows.index_of(index_in_window),
            "size": self._shapes,
            "rank": self._trainer.global_rank,
        }
        self._write(row)
        most = self._most_of(epoch)
        if self._in_row > MOST_IN_A_ROW or (most is not None and self._by_epoch[epoch] > most):
            raise UserError(
                f"{self._in_row} samples in a row and {self._by_epoch[epoch]} of this epoch did not fit and were left "
                f"out, more than {MOST_IN_A_ROW}, or one in {ONE_IN}: raise memory_budget, or make samples smaller; "
                "skipped.csv lists them."
            )
        said = ", ".join(f"{name} {value}" for name, value in row.items())
        print(rank_prefixed_message(f"AutoAccumulate: a sample is left out: {said}.", self._trainer.global_rank))
        return True

    def _most_of(self, epoch: int) -> int | None:
        """Return the most samples of an epoch that may be left out; ``None`` if its length is not known."""
        samples = self._data.windows.planner.samples_of_epoch(epoch)
        return None if samples is None else ceil_div(samples, ONE_IN)

    def _write(self, row: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "skipped.csv").open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*row])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)


def _nothing(module: torch.nn.Module) -> Tensor:
    """Return a loss of zero on which all that is trained depends, as reducers of ranks expect."""
    first = [parameter.flatten()[:1].float().sum() for parameter in module.parameters() if parameter.requires_grad]
    return torch.stack(first).sum() * 0.0
