"""Arithmetic and records: effective batches, micro-batches, windows, schedules, weights. Standard library only."""
