"""Callables for ``normalize=``: the public path of ``plan.weights``."""

from lightning_ga.plan.weights import AttentionMaskTokens, Samples, TargetTokens, count_items

__all__ = ["AttentionMaskTokens", "Samples", "TargetTokens", "count_items"]
