"""Choose the sizes of the steps that are recorded, and bound what fits by the first of them. Pure.

Tested in tests/probe/test_search.py.
"""

from dataclasses import dataclass, replace
from math import isqrt

from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.probe.curve import Step

UPDATE = 8  # bytes that optimizers of PyTorch need at most for a byte of gradients: Adam takes 2 to 5
MARGIN = 0.01  # share of the budget that holes may use in addition, if a device keeps a margin for them


@dataclass(frozen=True, slots=True)
class Task:
    """A search for the largest micro-batch up to ``high`` of which a step takes at most ``budget`` bytes."""

    high: int
    budget: int
    rounding: int = 1  # of the allocator, in bytes: 512 on CUDA; sizes are exact to the byte if it is 1
    multiple: int = 1  # of which micro-batches of at least so many samples are multiples
    in_segments: bool = False  # whether the budget bounds the segments that blocks are cut out of
    has_margin: bool = False  # whether there is one percent more than the budget, for an allocator's holes
    is_cautious: bool = False  # whether no step near the budget may run
    share: float = 1.0  # of the budget: what a cautious search lets a step take that it cannot predict


def trace_sizes(
    high: int, affordable: int, first: int = 2, *, kernels_vary: bool = False, traced: bool = False
) -> tuple[int, ...]:
    """Choose the sizes of the first traces, none below the ``first`` step: they fit for sure, yet lie apart.

    If the first step is ``traced`` as it is in training, it is one of them.

    Kernels of an accelerator use other temporaries for larger inputs, so there the traces are as large as a quarter of
    the memory allows.
    """
    if high < 3:
        return (high,)
    second = min(affordable // 4, high // 2)
    if kernels_vary and second > 8:
        return (second // 2, second)
    if not traced and 4 * first <= min(high, affordable):
        return (2 * first, 4 * first)
    if 2 * first <= min(high, affordable):
        return (first, 2 * first)
    return (first, first + 1)


def affordable_samples(first: Step, room: int, *, taken: int = 0, rounding: int = 1) -> int:
    """Return the samples that fit if all that grows does so in proportion, as the first step bounds it.

    Of the budget, ``room`` bytes are left beside what is alive after the step. All that the step took of these counts
    once, ``taken`` by an allocator's measure; and for as many samples more, what its forward and backward passes
    (before the last mark) allocate and release, which is on the safe side. All of it, if the step was not recorded.
    """
    once = max([taken, *(trace.transient_peak(rounding) for trace in first.traces)])
    growing = once
    if first.traces:
        marked = first.traces[-1]
        passes = marked.events[: marked.marks[-1]] if marked.marks else marked.events
        growing = replace(marked, events=passes).transient_peak(rounding) or once
    return (room - once) * first.samples // max(1, growing)


def most_bytes(trace: MemoryTrace, samples: int, *, peak: int, owned: int, gradients: int) -> int:
    """Return the most bytes that a step of so many samples can need, as a first pass of fewer bounds it.

    What the pass allocates grows at most as the square of the samples: attention and similarity matrices do. So does
    what it keeps besides the ``owned`` bytes, parameters and gradients. The recorded pass had a ``peak``; later ones
    make their ``gradients`` once more, to add them. Beside all that is what an optimizer may need for these gradients.
    """
    growing = trace.transient_peak() + max(0, trace.kept_bytes() - owned)
    fixed = max(peak, owned + gradients + trace.transient_peak()) + UPDATE * gradients
    return fixed + ceil_div(growing * samples**2, trace.samples**2)


def after_first_failure(sizes: tuple[int, ...], failed: int) -> tuple[int, ...]:
    """Return smaller sizes to trace if the first one ran out of memory."""
    if failed != sizes[0] or failed <= 4:
        return sizes
    root = isqrt(failed)  # something grows as the square: a tensor of ``root`` samples is as large as a line
    return (root // 2, root) if root > 8 else trace_sizes(failed - 1, 8)


def lowered(sizes: tuple[int, ...], task: Task, step: Step) -> tuple[int, ...]:
    """Lower the last size to what the memory that a recorded step has left allows if all grows as the square."""
    if not step.traces:
        return sizes
    kept = step.traces[0].kept_bytes(task.rounding)
    growing = max(1, step.trial.peak_bytes - kept)
    size = isqrt(step.samples**2 * max(0, task.budget - kept) // growing)
    return (*sizes[:-1], max(step.samples + 1, min(size, sizes[-1])))
