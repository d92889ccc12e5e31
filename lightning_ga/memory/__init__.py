"""Bytes: what a device has, live tensors, the CUDA allocator, out-of-memory errors, the record of a step."""
