"""Rows of sequences laid one after another, as Transformers' ``DataCollatorWithFlattening`` makes them."""

from itertools import pairwise
from typing import Any

import torch

from lightning_ga.batch.pytree import register_splitter


class FlattenedBatch(dict[str, Any]):
    """A batch of one row, in which sequences lie one after another: it is cut between them, and counts them.

    A sequence begins wherever ``position_ids`` is 0. Every tensor with an entry for each place of the row is cut, too;
    ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` become those of the part.

    Examples:
        Ready-made rows, of which each is a batch, and a loss that is a mean over the targets::

            loader = DataLoader(rows, batch_size=None, collate_fn=FlattenedBatch)
            AutoAccumulate(normalize=TargetTokens())
    """


def _starts(batch: FlattenedBatch) -> list[int]:
    """Return the places of the row at which sequences begin, and its end."""
    positions = batch["position_ids"].flatten()
    begins = positions == 0
    begins[:1] = True  # a row may begin within a sequence
    return [*begins.nonzero().flatten().tolist(), len(positions)]


def _take(batch: FlattenedBatch, start: int, stop: int) -> FlattenedBatch:
    """Return the sequences ``start`` to ``stop - 1`` of a row."""
    starts = _starts(batch)[start : stop + 1]
    row = batch["position_ids"].shape
    part = FlattenedBatch(batch)
    for name, value in batch.items():
        if name.startswith("cu_seq_lens"):
            part[name] = value[start : stop + 1] - value[start]
        elif name.startswith("max_length"):
            longest = max((after - before for before, after in pairwise(starts)), default=0)
            part[name] = value.new_tensor(longest) if isinstance(value, torch.Tensor) else type(value)(longest)
        elif isinstance(value, torch.Tensor) and value.shape[: len(row)] == row:
            part[name] = value.narrow(len(row) - 1, starts[0], starts[-1] - starts[0])
    return part


register_splitter(FlattenedBatch, count=lambda batch: len(_starts(batch)) - 1, take=_take)
