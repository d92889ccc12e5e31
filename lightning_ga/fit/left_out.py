"""Leave out samples that fit in no way (``on_oom="skip"``): their passes run on nothing and weigh nothing.

A window's passes have one sample each once one of them has failed, so the number of a pass in its window names the
sample, however often the window begins again. Ranks stay in step: the pass runs, with a loss of zero.
"""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_prefixed_message
from torch import Tensor

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.progress import Progress

MOST_IN_A_ROW = 10
MOST_OF_EPOCH = 100  # one sample in so many
COLUMNS = ("epoch", "window", "place", "index", "size", "rank")


class LeftOut:
    """Owns the samples of the running window that are left out, and the list of all.

    Args:
        progress: Where training is.
        gradients: Weighs passes.
        index_of: Returns the index in the dataset of a place in the window; ``None`` if it is not known.
        most: Returns the most samples of an epoch that may be left out; ``None`` if the epoch's length is not known.
    """

    def __init__(
        self,
        progress: Progress,
        gradients: Gradients,
        index_of: Callable[[int], Any],
        most: Callable[[], int | None],
    ) -> None:
        self._trainer = progress.trainer
        self._progress = progress
        self._gradients = gradients
        self._index_of = index_of
        self._most = most
        self._window = (-1, -1)  # epoch and number
        self._places: set[int] = set()  # of the window's passes
        self._running: tuple[int, str] | None = None  # place of the pass that runs, and shapes of its batch
        self._in_row = 0  # left out since a window was whole
        self._in_epoch = 0
        self._folder = Path()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which steps of samples that are left out return a loss of zero."""
        module = self._trainer.lightning_module
        step = module.training_step
        self._folder = Path(self._trainer.log_dir or self._trainer.default_root_dir)  # ranks ask for it together

        def training_step(batch: Any, *others: Any) -> Any:
            place = self._gradients.passes - 1
            if self._running is None or self._running[0] != place:  # a trial after an error has the same place
                self._running = (place, " ".join(str(tuple(tensor.shape)) for tensor in tensors_in(batch)))
            if place not in self._places:
                return step(batch, *others)
            self._gradients.leave_out()
            return _nothing(module)

        with shadowed(module, "training_step", training_step):
            yield

    def begin_window(self) -> None:
        """Begin a window, or begin it again."""
        position = self._progress.position
        if self._window != (position.epoch, position.windows_done):
            self._in_row = self._in_row if self._places else 0
            self._in_epoch = self._in_epoch if self._window[0] == position.epoch else 0
            self._window = (position.epoch, position.windows_done)
            self._places = set()

    def end_pass(self) -> None:
        """Note that the loop's batch is done."""
        self._running = None

    def add(self) -> bool:
        """Leave out the sample whose pass has failed; return whether one is known to have.

        Raises:
            UserError: If too many are left out.
        """
        if self._running is None or self._running[0] in self._places:
            return False
        place, sizes = self._running
        self._places.add(place)
        self._in_row += 1
        self._in_epoch += 1
        values = (*self._window, place, self._index_of(place), sizes, self._trainer.global_rank)
        self._write(values)
        most = self._most()
        if self._in_row > MOST_IN_A_ROW or (most is not None and self._in_epoch > most):
            raise UserError(
                f"{self._in_row} samples in a row and {self._in_epoch} of this epoch did not fit and were left out, "
                f"more than {MOST_IN_A_ROW}, or one in {MOST_OF_EPOCH}: raise memory_budget, or make samples smaller; "
                "skipped.csv lists them."
            )
        said = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS, values))
        print(rank_prefixed_message(f"AutoAccumulate: a sample is left out: {said}.", self._trainer.global_rank))
        return True

    def _write(self, values: tuple[Any, ...]) -> None:
        path = self._folder / "skipped.csv"
        self._folder.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(COLUMNS)
            writer.writerow(values)


def _nothing(module: torch.nn.Module) -> Tensor:
    """Return a loss of zero on which all that is trained depends, as reducers of ranks expect."""
    first = [parameter.flatten()[:1].sum() for parameter in module.parameters() if parameter.requires_grad]
    return torch.stack([each.float() for each in first]).sum() * 0.0
