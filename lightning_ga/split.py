"""Cut batches of own types: the public path of functions of ``lightning_ga.batch``.

Tested in tests/batch/test_split.py.
"""

from lightning_ga.batch.layout import split_batch
from lightning_ga.batch.pytree import register_splitter

__all__ = ["register_splitter", "split_batch"]
