"""See what the first batch of training is collated from, in whichever process that happens.

Tested in tests/loading/test_known_samples.py.
"""

import pickle
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from lightning_ga.loading.rebatch import copy_loader
from lightning_ga.memory.oom import attempt
from lightning_ga.snapshot.copies import copied


class ShownSamples:
    """A few samples of the first batch of ``loader``, a copy of the user's; its first worker writes them to a file."""

    def __init__(self, loader: Any, most: int) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._file = Path(file.name)
        weakref.finalize(self, self._file.unlink, missing_ok=True)
        self._samples: list[Any] = []
        self.loader = copy_loader(loader, collate_fn=partial(_collate_and_show, loader.collate_fn, self._file, most))

    def samples(self) -> list[Any]:
        """Return the samples; none before that batch has been collated, or if they cannot be pickled."""
        if self._file.exists() and not _is_awaited(self._file):
            self._samples = attempt(pickle.loads, lambda _: True, self._file.read_bytes()).result or []
            self._file.unlink()
        return self._samples


def _collate_and_show(collate: Callable[[Any], Any], file: Path, most: int, samples: list[Any]) -> Any:
    """Collate samples; write a few of them to a file that is there and empty, unless nothing is left of them."""
    is_first_worker = getattr(get_worker_info(), "id", 0) == 0  # or this process
    has_some = any(sample is not None for sample in samples)
    if is_first_worker and has_some and _is_awaited(file):
        few = attempt(lambda: pickle.dumps([*map(copied, samples[:most])]), lambda _: True).result
        part = file.with_suffix(".part")
        part.write_bytes(few or pickle.dumps([]))
        part.replace(file)  # whoever looks sees all or nothing
    return collate(samples)


def _is_awaited(file: Path) -> bool:
    """Return whether a file is there and empty: it is removed once it has been read."""
    with suppress(FileNotFoundError):
        return file.stat().st_size == 0
    return False
