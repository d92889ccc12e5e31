"""Scripts to copy from, and ``python -m examples.reproduce``."""
