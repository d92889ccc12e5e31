"""One measurement of whether micro-batches give the gradient of the whole batch: to read it, begin with ``measure``."""
