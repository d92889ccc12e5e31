"""Measurements behind the figures that the documentation quotes: ``python -m benchmarks.NAME``."""
