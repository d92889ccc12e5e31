"""Classic recipes of gradient accumulation, each measured: ``python -m examples.reproduce --help``."""
