"""The samples a second of a rank, measured in training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

WINDOWS = 50  # that are measured before shares change
clock = time.perf_counter


class Speed:
    """Measures the samples a second of this rank: the median over windows.

    The time of a window is that from its begin to the moment when the last gradients of its last backward pass are
    sent, without that of values which ranks exchange before. So nothing of it is waiting for other ranks. On a CUDA
    device, events note these moments, which are read once in so many windows.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._windows: list[tuple[int, list[list[Any]]]] = []  # samples, and first and last moments of work
        self._spans: list[list[Any]] = []  # of the running window
        self.begin_window()

    @property
    def is_measured(self) -> bool:
        """Whether enough windows have been measured since the speed was asked for."""
        return len(self._windows) >= WINDOWS

    def begin_window(self) -> None:
        """Begin a window, or begin it again after an error."""
        self._spans = []
        self._begin_span()

    def note_sending(self) -> None:
        """Note that all work up to here is done without waiting."""
        self._spans[-1][1] = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which ranks may wait for each other."""
        self.note_sending()
        yield
        self._begin_span()

    def end_window(self, samples: int) -> None:
        """Note the samples that this rank has run in the window."""
        self._windows.append((samples, self._spans))

    def take(self) -> float:
        """Return the speed in the windows since the last call; 0 if nothing was sent in any."""
        windows = self._windows
        self._windows = []
        speeds = []
        for samples, spans in windows:
            seconds = sum(self._seconds(first, last) for first, last in spans)
            if seconds > 0:
                speeds.append(samples / seconds)
        return median(speeds) if speeds else 0.0

    def _begin_span(self) -> None:
        now = self._now()
        self._spans.append([now, now])

    def _now(self) -> Any:
        if not self._is_cuda:
            return clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, first: Any, last: Any) -> float:
        if not self._is_cuda:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000
