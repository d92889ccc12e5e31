"""Count what a batch weighs, for ``normalize=``: the public path of these counters.

Tested in tests/plan/test_window_weights.py.
"""

from lightning_ga.batch.layout import Samples
from lightning_ga.plan.item_counters import AttentionMaskTokens, TargetTokens, count_items

__all__ = ["AttentionMaskTokens", "Samples", "TargetTokens", "count_items"]
