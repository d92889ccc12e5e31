"""Copies of small tensors."""

import torch

from lightning_ga.snapshot.copies import SmallCopies


def test_copies_made_in_evaluation_are_written_to_in_training() -> None:
    """A sanity check comes first: what is made in inference mode could not be written to outside of it."""
    tensors = [torch.zeros(()), torch.zeros(3), torch.zeros(2, 3)]
    with torch.inference_mode():
        copies = SmallCopies(tensors)
        copies.take()
    for tensor in tensors:
        tensor += 1
    copies.take()
    for tensor in tensors:
        tensor += 1
    copies.restore()
    assert all(bool((tensor == 1).all()) for tensor in tensors)
