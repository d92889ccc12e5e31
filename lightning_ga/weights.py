"""What a micro-batch must weigh so that a window's gradient is that of its samples in one pass.

A loss is a mean over the samples of one micro-batch. Lightning divides it by the accumulation
factor A (``loops/optimization/automatic.py`` of 2.6.6, ``ClosureResult``) and data parallelism
averages gradients over W ranks, so the optimizer sees Σ gᵢ / (A·W). The mean over the whole window
of N samples is Σ nᵢ gᵢ / N: the micro-batch of nᵢ samples must weigh A·W·nᵢ / N.
"""


def known_weight(count: float, window: float, *, factor: int, world_size: int) -> float:
    """Weight of a micro-batch whose window is known in advance; 1.0 where all are equal.

    Args:
        count: Samples (or tokens) of this micro-batch.
        window: Samples (or tokens) of the window, over all ranks.
        factor: The accumulation factor by which Lightning divides.
        world_size: Ranks over which gradients are averaged.

    Examples:
        >>> known_weight(43, 128, factor=3, world_size=1)
        1.0078125
    """
    return factor * world_size * count / window


def window_scale(total: float, *, reference: float, factor: int, world_size: int) -> float:
    """Scale for the gradients of a window whose micro-batches weighed ``count / reference``.

    Used where the window is known only when it is over. The reference is near the mean count, so
    that the weights are near one and half precision neither overflows nor loses digits.

    Args:
        total: Samples (or tokens) that the window turned out to hold, over all ranks.
        reference: What the counts were divided by.
        factor: The accumulation factor by which Lightning divided.
        world_size: Ranks over which gradients were averaged.

    Examples:
        >>> window_scale(6, reference=2, factor=4, world_size=1)  # a stream that ended one short
        1.3333333333333333
    """
    return factor * world_size * reference / total


class LateWindow:
    """Weights of a window whose samples are counted as they come.

    Args:
        reference: A count near the mean of a micro-batch.

    Examples:
        >>> window = LateWindow(reference=2)
        >>> window.weigh(2), window.weigh(1)
        (1.0, 0.5)
        >>> window.close(window.total, factor=4, world_size=1)
        2.6666666666666665
    """

    def __init__(self, reference: float) -> None:
        self.reference = reference
        self.total = 0.0

    def weigh(self, count: float) -> float:
        """Weight of one more micro-batch of this rank."""
        self.total += count
        return count / self.reference

    def close(self, total: float, *, factor: int, world_size: int) -> float:
        """Scale for the window's gradients, given its samples over all ranks; the next window starts empty."""
        self.total = 0.0
        return window_scale(total, reference=self.reference, factor=factor, world_size=world_size)
