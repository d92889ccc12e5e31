"""What micro-batches are weighted by, and callables for ``normalize=``: the public path of ``plan.weights``."""

from lightning_ga.plan.weights import (
    AttentionMaskTokens,
    Samples,
    TargetTokens,
    count_items,
    known_weight,
    window_scale,
)

__all__ = ["AttentionMaskTokens", "Samples", "TargetTokens", "count_items", "known_weight", "window_scale"]
