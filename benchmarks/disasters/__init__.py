"""What befalls the runs of ``benchmarks.chaos``."""
