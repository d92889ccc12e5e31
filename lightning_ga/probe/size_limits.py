"""The limits of micro-batches of unequal samples, from trials at two sizes of a sample.

The memory of ``b`` padded samples of size ``l`` is c + b·(γ + αl + βl²): activations, and attention matrices. Along
b·l = area it is c + area·(γ/l + α + βl), convex in ``l`` and so largest at an end: at the longest size, whose limit is
known, or at a shorter size, at which the samples that this area allows are tried. Micro-batches of even shorter samples
get no more samples. If fewer fit at the shorter size, the memory of a sample, convex in ``l``, is bounded by the chord
through both limits: size + offset. Pure: trials come in as a function.
"""

from collections.abc import Callable, Sequence

from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.plan.size_cuts import SizeLimits

_SHARES = (1.0, 0.75, 0.5)  # of the samples that the area allows at the shorter size, tried in turn


def limits_by_size(
    confirm: Callable[[Sequence[int]], tuple[int, int]], limit: int, *, longest: int, shorter: int
) -> tuple[SizeLimits, int]:
    """Return the limits for micro-batches, of which ``limit`` samples fit at the longest, and the steps run so far.

    ``confirm`` returns the first of some numbers of samples of the shorter size that fits, or 0, and those steps.

    Examples:
        >>> limits_by_size(lambda sizes: (sizes[1], 6), 8, longest=400, shorter=50)
        (SizeLimits(budget=3360, samples=48, offset=20), 6)
    """
    most = ceil_div(limit * longest, shorter)
    if most <= limit:
        return SizeLimits(limit * longest, limit), 0
    shares = [int(share * most) for share in _SHARES]
    fits, steps = confirm([samples for samples in shares if samples > limit])  # ``limit`` samples fit at every size
    fits = max(limit, fits)
    offset = 0
    if limit < fits < most:  # the chord: limit × (longest + offset) = fits × (shorter + offset)
        offset = max(0, ceil_div(limit * longest - fits * shorter, fits - limit))
    return SizeLimits(limit * (longest + offset), fits, offset), steps
