"""The user's loader, re-batched: orders, windows, micro-batches, batches that come ready-made, the largest samples."""
