"""Cut batches of own types: the public path of ``lightning_ga.batch.split``."""

from lightning_ga.batch.split import register_splitter, split_batch

__all__ = ["register_splitter", "split_batch"]
