"""Batches are counted and cut by their layout, by the module's hook, or by collating their samples anew."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import quiet_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from lightning_ga.batch import pytree as structures
from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat.dataloaders import BatchTransfer
from lightning_ga.loading.reader import BatchReader, CollatedAgain, CollatedBatches, ReadyMadeBatches, indices_of

SIZE = 24


class Rows(Dataset[Any]):
    """Sample i is a vector full of i, and i."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index


class Endless(IterableDataset[Any]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class Plain(pl.LightningModule):
    """A module without hooks of its own."""


def trainer_of(module: pl.LightningModule) -> pl.Trainer:
    trainer = quiet_trainer()
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    trainer._data_connector.attach_datamodule(module, None)
    module.trainer = trainer
    return trainer


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "_SPLITTERS", {})


def loader_of(collate: Callable[[list[Any]], Any] = default_collate, dataset: Any = None) -> "DataLoader[Any]":
    return DataLoader(Rows() if dataset is None else dataset, 8, collate_fn=collate)


def collated(*loaders: "DataLoader[Any]", combine: Callable[[list[Any]], Any] | None = None) -> CollatedBatches:
    return CollatedBatches(loaders) if combine is None else CollatedBatches(loaders, combine)


def reader(module: pl.LightningModule, source: Any) -> BatchReader:
    return BatchReader(BatchTransfer(trainer_of(module)), source)


def first(loader: Any) -> Any:
    return next(iter(loader))


def samples_of(loader: "DataLoader[Any]", count: int = 8) -> CollatedAgain:
    return CollatedAgain(loader, [loader.dataset[index] for index in range(count)])


def test_batches_are_counted_and_cut_where_samples_lie() -> None:
    """Every batch of a loader, the last one too; the layout is read once."""
    loader = loader_of()
    read = reader(Plain(), collated(loader))
    assert not read.is_read()
    assert read.count(first(loader)) == 8
    assert read.is_read()
    assert read.layout() is read.layout()
    slices = read.slices(first(loader), expected=8)
    assert slices.samples == 8
    assert slices.take(2, 5)[1].tolist() == [2, 3, 4]
    assert slices.take(2, 5)[0].shape == (3, 3)
    assert not read.makes_anew
    assert read.count([torch.zeros(5, 3), torch.zeros(5)], expected=8) == 5


def packed(batch: list[Any]) -> dict[str, Any]:
    """Rows of all samples and where they end."""
    rows = [torch.full((index % 3 + 1, 2), float(index)) for _, index in batch]
    return {"rows": torch.cat(rows), "ends": torch.tensor([len(each) for each in rows]).cumsum(0)}


def test_packed_batches_are_cut_by_collating_their_samples_anew() -> None:
    """Each slice is what the collate function makes of its samples; from then on all batches are cut so."""
    loader = loader_of(packed)
    read = reader(Plain(), collated(loader))
    batch, again = first(loader), samples_of(loader)
    with pytest.raises(LayoutError, match="split_batch"):
        read.slices(batch, expected=8)
    slices = read.slices(batch, expected=8, samples=lambda: again)
    assert slices.samples == 8
    assert structures.same_values(slices.take(3, 6), packed([(None, 3), (None, 4), (None, 5)]))
    assert read.makes_anew
    read.check(lambda: again)
    with pytest.raises(LayoutError, match="split_batch"):
        read.check(lambda: None)


def test_batches_that_are_not_the_same_again_cannot_be_collated_anew() -> None:
    """Random augmentation in the dataset, for example: samples were other ones; noise of the collate function."""
    loader = loader_of(packed)
    read = reader(Plain(), collated(loader))
    others = CollatedAgain(loader, [loader.dataset[index + 1] for index in range(8)])
    with pytest.raises(LayoutError, match="not the same when its samples are read and collated again.*split_batch"):
        read.slices(first(loader), expected=8, samples=lambda: others)
    assert not read.makes_anew

    def noisy(batch: list[Any]) -> Any:
        made = packed(batch)
        return made | {"rows": made["rows"] + torch.rand(())}

    loader = loader_of(noisy)
    with pytest.raises(LayoutError, match="random augmentation"):
        reader(Plain(), collated(loader)).check(lambda: samples_of(loader))


def test_a_loader_without_samples_or_of_unknown_kind_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"the loader yields no sample in the first epoch: let .* or use micro_batching=\"loader\""
    ):
        reader(Plain(), collated(loader_of(dataset=TensorDataset(torch.zeros(0, 3))))).layout()
    with pytest.raises(LayoutError, match=r"none was looked at before training: define split_batch"):
        reader(Plain(), ReadyMadeBatches(list)).layout()


def test_a_collate_function_that_fails_on_a_few_samples_is_named() -> None:
    """With its error and the way out; an error of memory stays what it is."""

    def collate(batch: list[Any]) -> Any:
        raise KeyError("image")

    with pytest.raises(LayoutError, match=r"collating a few of them apart ended in KeyError: 'image'.*split_batch"):
        reader(Plain(), collated(loader_of(collate))).layout()

    def full(batch: list[Any]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        reader(Plain(), collated(loader_of(full))).layout()


def test_indices_are_from_all_over_the_dataset() -> None:
    """Of a stream there are none, and of a dataset without a length those of the first batch."""
    assert indices_of(loader_of()) == [0, 17, 10, 3, 20, 13, 6, 23]
    assert indices_of(loader_of(dataset=[(0, 0)] * 3)) == [0, 2, 1]
    assert indices_of(DataLoader(Endless(), 4)) == [None] * 8

    class Lookup(Dataset[Any]):
        def __getitem__(self, index: str) -> str:
            return index

    assert indices_of(DataLoader(Lookup(), batch_sampler=[["a", "b"], ["c"]])) == ["a", "b"]  # type: ignore[arg-type]


def test_no_more_samples_are_counted_than_were_fetched() -> None:
    """What expects fewer is believed; where the batch does not tell, it is the answer."""
    read = reader(Plain(), collated(loader_of()))
    assert read.count([torch.zeros(8, 3), torch.zeros(8)], expected=6) == 6
    assert read.count(object(), expected=6) == 6
    assert read.count(object(), otherwise=4) == 4
    with pytest.raises(LayoutError, match="another kind"):
        read.count(object())
    with pytest.raises(LayoutError, match=r"seems to hold 8 where the loader was asked for 6.*split_batch"):
        read.slices([torch.zeros(8, 3), torch.zeros(8)], expected=6)
