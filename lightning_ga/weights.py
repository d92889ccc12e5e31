"""Callables for ``normalize=``: the public path of ``plan.weights``.

Tested in tests/plan/test_weights.py.
"""

from lightning_ga.plan.weights import AttentionMaskTokens, Samples, TargetTokens, count_items

__all__ = ["AttentionMaskTokens", "Samples", "TargetTokens", "count_items"]
