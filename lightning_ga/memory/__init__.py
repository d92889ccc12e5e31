"""Bytes: the memory of a device, live tensors, the CUDA allocator, out-of-memory errors, the record of a step."""
