"""How many samples the pieces of a batch have, in training and in evaluation, and how many after an error."""

from lightning_ga.plan.accumulation import split_evenly


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient of two whole numbers, rounded up.

    Examples:
        >>> ceil_div(7, 2)
        4
    """
    return -(-dividend // divisor)


def piece_sizes(samples: int, limit: int | None) -> tuple[int, ...]:
    """Return the samples of each piece of a batch: the fewest near-equal pieces within the limit, if there is one.

    Examples:
        >>> piece_sizes(256, 119)
        (86, 85, 85)
        >>> piece_sizes(256, None)
        (256,)
    """
    parts = 1 if limit is None else max(1, ceil_div(samples, limit))
    return split_evenly(samples, parts)


def halved(failed: int) -> int | None:
    """Return the limit after a pass of so many samples has run out of memory; ``None`` if it had one sample.

    Examples:
        >>> halved(85)
        43
    """
    return None if failed <= 1 else ceil_div(failed, 2)
