"""The first name of ``lightning_ga.counters``, which recipes of before still use.

Tested in tests/test_public.py.
"""

from lightning_ga.counters import AttentionMaskTokens, Samples, TargetTokens, count_items

__all__ = ["AttentionMaskTokens", "Samples", "TargetTokens", "count_items"]
