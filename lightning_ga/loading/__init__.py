"""The user's loader, re-batched: orders, windows, micro-batches, ready-made batches, the largest samples."""
