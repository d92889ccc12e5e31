"""Count what a batch weighs, for ``normalize=``: the public path of the counters in ``plan.item_counters``.

Tested in tests/plan/test_window_weights.py.
"""

from lightning_ga.plan.item_counters import AttentionMaskTokens, Samples, TargetTokens, count_items

__all__ = ["AttentionMaskTokens", "Samples", "TargetTokens", "count_items"]
