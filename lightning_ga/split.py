"""Cut batches of own types: the public path of what ``lightning_ga.batch`` has for that.

Tested in tests/batch/test_split.py.
"""

from lightning_ga.batch.flattened import FlattenedBatch
from lightning_ga.batch.pytree import register_splitter

__all__ = ["FlattenedBatch", "register_splitter"]
