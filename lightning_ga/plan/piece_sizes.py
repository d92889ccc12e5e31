"""How many samples the pieces of a batch have, in training and in evaluation, and how many after an error.

Tested in tests/plan/test_piece_sizes.py.
"""

from lightning_ga.plan.accumulation import ceil_div, micro_batch_sizes


def piece_sizes(samples: int, limit: int | None, multiple: int = 1) -> tuple[int, ...]:
    """Return the samples of each piece of a batch: the fewest near-equal pieces within the limit, if there is one.

    Examples:
        >>> piece_sizes(256, 119)
        (86, 85, 85)
        >>> piece_sizes(256, None)
        (256,)
        >>> piece_sizes(14, 7, multiple=2)
        (6, 4, 4)
    """
    if limit is None:
        return (samples,)
    return micro_batch_sizes(samples, limit, multiple)


def halved(failed: int) -> int | None:
    """Return the limit after a pass of so many samples has run out of memory; ``None`` if it had one sample.

    Examples:
        >>> halved(85)
        43
    """
    return None if failed <= 1 else ceil_div(failed, 2)
