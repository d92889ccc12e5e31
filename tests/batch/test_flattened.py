"""Rows of several sequences are cut between these, and train as if they were not."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.read_layout import read_ready_made
from lightning_ga.plan.item_counters import TargetTokens
from lightning_ga.split import FlattenedBatch

WORDS = 11


def flattened(*lengths: int) -> dict[str, Any]:
    """What Transformers' collator makes of sequences of these lengths."""
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = (3 * torch.arange(places.numel()) % WORDS)[None]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(places == 0, -100),
        "position_ids": places,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


ROWS = [flattened(5, 2, 3, 7, 2, 4, 6, 3), flattened(2, 2, 9, 3, 3, 8, 2, 5), flattened(4, 4, 4, 2, 6, 3, 2, 7)]


def test_a_row_is_cut_between_its_sequences() -> None:
    batch = FlattenedBatch(flattened(3, 2, 4))
    layout = read_ready_made(batch)
    assert layout.samples(batch) == 3
    part = layout.cut(batch, 1, 3)
    assert type(part) is FlattenedBatch
    assert part["input_ids"].tolist() == batch["input_ids"][:, 3:].tolist()
    assert part["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == [0, 2, 6]
    assert part["cu_seq_lens_q"].dtype == torch.int32
    assert (part["max_length_q"], layout.cut(batch, 0, 2)["max_length_k"]) == (4, 3)
    batch["position_ids"] += 5  # the rest of a longer sequence
    assert read_ready_made(batch).samples(batch) == 1
    with pytest.raises(LayoutError, match="ready-made"):
        read_ready_made(flattened(3, 2, 4))


class Tagger(LightningModule):
    """Predicts each word from the mean of those of its sequence up to the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, WORDS, dtype=torch.float64)
        self.passes = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        places = batch["position_ids"][0]
        of_sequence = (places == 0).cumsum(0)
        before = (of_sequence[:, None] == of_sequence) & (places[:, None] >= places)
        hidden = before.double() @ self.embed(batch["input_ids"][0]) / (places[:, None] + 1)
        self.passes += 1
        predicted = self.head(hidden)[:-1]
        return torch.nn.functional.cross_entropy(predicted, batch["labels"][0, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def trained(collate: Any, *callbacks: Any) -> Tagger:
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    module = Tagger()
    trainer = Trainer(max_epochs=2, callbacks=list(callbacks), enable_model_summary=False, **settings)
    trainer.fit(module, DataLoader(ROWS, batch_size=None, collate_fn=collate))  # type: ignore[arg-type]
    return module


def test_training_in_pieces_of_a_row_is_training_on_rows() -> None:
    """Weighted by targets, of which every sequence has one less than it has words."""
    whole = trained(dict)
    module = trained(FlattenedBatch, AutoAccumulate(micro_batch_size=3, normalize=TargetTokens()))
    assert module.passes > 3 * whole.passes - 1
    for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_the_longest_sequence_is_that_of_the_part(kind: Any) -> None:
    """A number, or a tensor of no dimension; a part of no sequences has none."""
    row = flattened(3, 2, 4)
    batch = FlattenedBatch(row | {"max_length_q": kind(4)})
    layout = read_ready_made(batch)
    for start, stop, longest in ((0, 2, 3), (1, 3, 4), (2, 2, 0)):
        part = layout.cut(batch, start, stop)["max_length_q"]
        assert type(part) is type(batch["max_length_q"])
        assert int(part) == longest
