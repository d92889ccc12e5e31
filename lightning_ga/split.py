"""Cut batches of own types: the public path of functions of ``lightning_ga.batch``."""

from lightning_ga.batch.pytree import register_splitter
from lightning_ga.batch.split import split_batch

__all__ = ["register_splitter", "split_batch"]
