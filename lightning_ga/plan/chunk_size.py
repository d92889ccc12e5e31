"""How large the chunks are in which submodules run over a window. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ga.plan.accumulation import split_evenly


@dataclass(slots=True)
class ChunkSize:
    """How large the chunks of forward passes are from here on."""

    samples: int | None = None  # ``None`` to run whole batches
    keep: int = 0  # chunks that keep their activations: the last of each call, or of all calls of a step if counted
    step_calls: int | None = None  # calls that a step makes, as the step before made; ``None`` if they are not counted
    calls: int = 0  # of this step so far
    window: int | None = None  # samples of the batch, if that is known: of each a module may get several views
    on_recompute: Callable[[], object] | None = None  # called once, as the first chunk is computed again
    recomputes_all: bool = False  # also a batch of one chunk: a module may be called several times in a step
    even: bool = False  # whether chunks are of near-equal size, as planned, or as large as may be

    def begin_step(self, window: int | None) -> None:
        """Begin a step on a batch of so many samples, if that is known."""
        self.window, self.calls = window, 0

    def kept(self, chunks: int) -> range:
        """Return which of a call's chunks keep their activations."""
        if self.step_calls is None:
            return range(chunks - self.keep, chunks)
        self.calls += 1
        later = self.step_calls - self.calls
        return range(chunks if later < 0 else min(chunks, chunks * (later + 1) - self.keep), chunks)

    def recomputes(self) -> None:
        """Note that the backward pass of a step has come to a chunk: all its calls are made."""
        if self.step_calls is not None:
            self.step_calls = self.calls
        notify, self.on_recompute = self.on_recompute, None
        if notify is not None:
            notify()

    def sizes(self, entries: int) -> list[int]:
        """Return the sizes of the chunks of a module's batch of so many entries; the last is none of a single one."""
        views = max(1, entries // (self.window or entries))
        most = entries if self.samples is None else min(entries, self.samples * views)
        if self.even:
            return list(split_evenly(entries, -(-entries // most)))
        sizes = [most] * (entries // most) + [entries % most] * (entries % most > 0)
        if sizes[-1] == 1 and most > 2:  # BatchNorm refuses one sample
            sizes[-2:] = [most - 1, 2]
        return sizes
