"""The gradients of a plain loop, whatever the collate function does with samples; the loader cuts."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ddp, on_ranks
from reference import (
    Regression,
    Samples,
    SaveAll,
    StreamOf,
    cut,
    fit,
    flat_gradient,
    loss,
    network,
    permutation,
    plain_loop,
    worst_error,
)
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate
from torchmetrics import MeanMetric

from lightning_ga import AutoAccumulate
from lightning_ga.errors import ExactnessWarning
from lightning_ga.testing import limit_memory


class ReadyMade(Dataset[Any]):
    """Batches of three samples."""

    def __init__(self, size: int) -> None:
        self.samples = Samples(3 * size)

    def __len__(self) -> int:
        return len(self.samples) // 3

    def __getitem__(self, index: int) -> Any:
        return default_collate([self.samples[3 * index + row] for row in range(3)])


def first_of(batch: list[Any]) -> Any:
    return batch[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_takes_the_first_of_its_samples(workers: int) -> None:
    """Samples of several batches are not given to it at once: it would leave all but one out."""
    loader = DataLoader(ReadyMade(12), batch_size=1, collate_fn=first_of, num_workers=workers)
    stock, _ = fit(loader, accumulate_grad_batches=4, max_epochs=1)
    accumulate = AutoAccumulate()
    ours, _ = fit(loader, accumulate, accumulate_grad_batches=4, max_epochs=1)
    assert ours.micro_batches == stock.micro_batches
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12
    assert accumulate.exactness is None  # batches run as in stock Lightning, so there is nothing to measure


class TwoRows(Regression):
    """Two rows a sample, joined; cut by a method of its own."""

    def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
        rows = [2 * size for size in sizes]
        return list(zip(*(part.split(rows) for part in batch)))


def join_two_rows(batch: list[Any]) -> Any:
    return [torch.cat([torch.stack([part, 2 * part]) for part in parts]) for parts in zip(*batch)]


def fitted(collate: Any, dataset: Any, module: Any = None, **settings: Any) -> Any:
    """A run whose windows of eight are micro-batches of 3, 3 and 2, and the gradients of whole windows."""
    loader = DataLoader(dataset, 8, collate_fn=collate)
    whole, _ = fit(loader, AutoAccumulate(micro_batch_size=8), max_epochs=1, module=module and module())
    accumulate = AutoAccumulate(micro_batch_size=3, **settings)
    ours, _ = fit(loader, accumulate, max_epochs=1, module=module and module())
    assert max(len(indices) for _, indices in ours.micro_batches) < 8
    assert accumulate.exactness is not None
    assert accumulate.exactness.cause == "exact"
    return worst_error(ours.gradients, whole.gradients)


class NumberedRows(Samples):
    """With indices as tensors."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets, _ = super().__getitem__(index)
        return inputs, targets, torch.tensor(index)


def test_rows_that_collating_joins_are_not_samples() -> None:
    """With ``split_batch``, which is given numbers of samples."""
    assert fitted(join_two_rows, NumberedRows(24), TwoRows) <= 1e-12


class Flawed(Samples):
    """Every third sample is marked."""

    def __getitem__(self, index: int) -> Any:
        return {"sample": super().__getitem__(index), "is_good": index % 3 != 1}


def keep_good(batch: list[Any]) -> Any:
    return default_collate([each["sample"] for each in batch if each["is_good"]])


def test_a_probed_sample_that_is_dropped_leaves_the_layout_readable() -> None:
    assert fitted(keep_good, Flawed(24)) <= 1e-12


def flatten_good(batch: list[Any]) -> Any:
    """Rows of a number that depends on the sample."""
    kept = [each["sample"] for each in batch if each["is_good"]]
    return [
        torch.cat([torch.atleast_1d(torch.as_tensor(sample[part])).expand(1 + sample[2] % 2, -1) for sample in kept])
        for part in range(3)
    ]


class Augmented(NumberedRows):
    """Draws random numbers that cannot be put back."""

    def __getitem__(self, index: int) -> Any:
        inputs, *others = super().__getitem__(index)
        return inputs + 1e-9 * np.random.default_rng().random(), *others


def without_5_to_7(batch: list[Any]) -> Any:
    return default_collate([sample for sample in batch if sample[2] not in (5, 6, 7)])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_left_out_weigh_nothing_in_windows_of_several_batches(workers: int) -> None:
    """Also if only the first batch shows samples, and the window was planned before it."""
    data = Augmented(16)
    accumulate = AutoAccumulate(effective_batch_size=8)
    ours, _ = fit(DataLoader(data, 4, collate_fn=without_5_to_7, num_workers=workers), accumulate, max_epochs=1)
    whole, _ = fit(DataLoader(data, 8, collate_fn=without_5_to_7), max_epochs=1)
    assert list(map(len, (indices for _, indices in ours.micro_batches))) == [4, 1, 4, 4]
    assert worst_error(ours.gradients, whole.gradients) <= 1e-6


def without_1_to_3(batch: list[Any]) -> Any:
    return default_collate([sample for sample in batch if sample[2] not in (1, 2, 3)])


@pytest.mark.parametrize(
    ("data", "budget", "largest"),
    [
        (Augmented(16), {}, 4),
        (StreamOf(NumberedRows(16)), {}, 4),
        (StreamOf(NumberedRows(16)), {"memory_budget": "1GB"}, 1),
    ],
    ids=["augmented", "stream", "budget"],
)
def test_a_first_batch_of_which_one_sample_is_left_is_tried(data: Any, budget: dict[str, Any], largest: int) -> None:
    """As one sample; windows are cut as if it were whole, unless the limit itself was looked for."""
    accumulate = AutoAccumulate(effective_batch_size=8, verify=False, **budget)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The probe found no limit")
        ours, _ = fit(DataLoader(data, 4, collate_fn=without_1_to_3), accumulate, max_epochs=1)
    whole, _ = fit(DataLoader(data, 8, collate_fn=without_1_to_3), max_epochs=1)
    assert max(len(indices) for _, indices in ours.micro_batches) == largest
    assert worst_error(ours.gradients, whole.gradients) <= 1e-6


def test_a_number_of_samples_that_cannot_be_read_is_said() -> None:
    """If some of those that were read are dropped."""
    with pytest.warns(ExactnessWarning, match=r"planned with 3 samples, and .* made a number that cannot be counted"):
        fit(
            DataLoader(Flawed(24), 8, collate_fn=flatten_good),
            AutoAccumulate(micro_batch_size=3, verify=False),
            max_epochs=1,
        )


class AtOnce(Samples):
    """Reads whole batches, as dictionaries."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"inputs": self.inputs[indices], "targets": self.targets[indices], "index": torch.tensor(indices)}


class OfFields(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch["inputs"], batch["targets"], batch["index"]), batch_idx)


def as_it_is(batch: Any) -> Any:
    return batch


def test_a_dataset_that_reads_batches_has_samples() -> None:
    """Its fields are none: three micro-batches weigh what they have, and halves are those of its samples."""
    assert fitted(as_it_is, AtOnce(24), OfFields) <= 1e-12


class Finishing(DataLoader[Any]):
    """Finishes its batches in the main process, after the collate function."""

    def _get_iterator(self) -> Any:
        return map(default_collate, super()._get_iterator())


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_loader_that_finishes_batches_is_measured(mode: Any) -> None:
    accumulate = AutoAccumulate(micro_batch_size=3, micro_batching=mode)
    loader = Finishing(Samples(24), 8, collate_fn=list)
    ours, _ = fit(loader, accumulate, max_epochs=1)
    stock, _ = fit(loader, max_epochs=1)
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12
    assert accumulate.exactness is not None
    assert accumulate.exactness.cause == "exact"


class Sequences(Dataset[Any]):
    """One in five is short."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2 if index % 5 == 0 else 6, 5, generator=generator, dtype=torch.float64)


class OfLastStep(Regression):
    """Reads the last step, which is padding for short sequences."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.micro_batches.append((self.global_step, [0] * len(batch)))
        return self.net(batch[:, -1]).square().mean()


@pytest.mark.filterwarnings("ignore:Accumulation is not exact")
def test_a_loss_that_reads_padding_is_found() -> None:
    """Though most samples are as long as the longest."""
    loader = DataLoader(Sequences(), 8, collate_fn=lambda batch: pad_sequence(batch, batch_first=True))
    accumulate = AutoAccumulate(micro_batch_size=3)
    fit(loader, accumulate, module=OfLastStep(), max_epochs=1)
    assert accumulate.exactness is not None
    assert accumulate.exactness.cause == "coupled"


class Zipped(DataLoader[Any]):
    """Joins the batches of two loaders, and says nothing of their size."""

    def __init__(self, *loaders: Any) -> None:
        super().__init__(loaders[0].dataset)
        self.loaders = loaders

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __iter__(self) -> Any:
        return zip(*self.loaders)


class OfPairs(Regression):
    """The loss on the batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(super(OfPairs, self).training_step(part, batch_idx) for part in batch) / 2


@pytest.mark.parametrize("limit", [{}, {"micro_batch_size": 3}])
def test_a_loader_that_zips_others_has_the_samples_of_its_batches(limit: dict[str, int]) -> None:
    """And not one a batch, DataLoader's default ``batch_size``; reading the first leaves no trace."""
    loader = Zipped(DataLoader(Samples(32), 8), DataLoader(Samples(32), 8))
    stock, _ = fit(loader, max_epochs=1, module=OfPairs(), accumulate_grad_batches=2)
    accumulate = AutoAccumulate(**limit)
    ours, _ = fit(loader, accumulate, max_epochs=1, module=OfPairs(), accumulate_grad_batches=2)
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12
    assert accumulate.plan is not None
    assert accumulate.plan.effective_batch_size == 16
    assert accumulate.exactness is not None
    assert accumulate.exactness.cause == "exact"
    assert max(len(indices) for _, indices in ours.micro_batches) == limit.get("micro_batch_size", 8)


class OfJagged(Regression):
    """Computes with two jagged tensors that share their offsets; a mean over sequences."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        self.micro_batches.append((self.global_step, [0] * len(inputs)))
        errors = (
            torch.nested.nested_tensor_from_jagged(self.net(inputs.values()), inputs.offsets()) - targets
        ).unbind()
        return torch.stack([error.square().sum() for error in errors]).mean()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_jagged_tensors_of_one_batch_are_cut_alike() -> None:
    data = Samples(24)
    batches = []
    for start in (0, 12):
        rows, offsets = slice(start, start + 12), torch.tensor([0, 1, 4, 6, 7, 12])
        parts = (data.inputs[rows], data.targets[rows])
        batches.append([torch.nested.nested_tensor_from_jagged(part, offsets=offsets) for part in parts])
    loader = DataLoader(batches, batch_size=None, collate_fn=as_it_is)  # type: ignore[arg-type]
    stock, _ = fit(loader, module=OfJagged(), max_epochs=1)
    ours, _ = fit(loader, AutoAccumulate(micro_batch_size=2), module=OfJagged(), max_epochs=1)
    assert max(len(sequences) for _, sequences in ours.micro_batches) == 2
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12


class Unpads(Regression):
    """Packs its sequences, and pads what comes out to the longest of those that it got."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, lengths = batch
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(packed, batch_first=True)
        return (self.net(outputs) - inputs.sum(2, keepdim=True)).square().mean()


def pad_with_lengths(batch: list[torch.Tensor]) -> Any:
    return pad_sequence(batch, batch_first=True), torch.tensor([len(each) for each in batch])


def test_an_error_of_a_piece_names_the_cut() -> None:
    """A piece has the padding of its batch, which a step may not expect."""
    loader = DataLoader(Sequences(), 10, collate_fn=pad_with_lengths)
    accumulate = AutoAccumulate(micro_batch_size=1, micro_batching="step", verify=False)
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        fit(loader, accumulate, module=Unpads(), max_epochs=1)
    (note,) = caught.value.__notes__
    assert "10 samples were cut into pieces of 1, 1, 1" in note
    assert "total_length=" in note


# --- micro-batches of which nothing is left -----------------------------------------------------


class Broken(Samples):
    """Some samples are ``None``."""

    def __init__(self, size: int, broken: Iterable[int]) -> None:
        super().__init__(size)
        self.broken = {*broken}

    def __getitem__(self, index: int) -> Any:
        return None if index in self.broken else super().__getitem__(index)


class Marked(Broken):
    """Some samples are marked."""

    def __getitem__(self, index: int) -> Any:
        return {"sample": Samples.__getitem__(self, index), "is_good": index not in self.broken}


class Shaken(Broken):
    """Draws random numbers that cannot be put back, so that samples are not read apart from training."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample and (sample[0] + 1e-12 * np.random.default_rng().random(), *sample[1:])


def none_if_empty(samples: list[Any]) -> Any:
    kept = [sample for sample in samples if sample is not None]
    return default_collate(kept) if kept else None


def filtered(samples: list[Any]) -> Any:
    """Raises an error if no sample is left."""
    return default_collate([sample for sample in samples if sample is not None])


class Told(Regression):
    """Logs its loss, and counts the samples that its steps get."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        value = super().training_step(batch, batch_idx)
        self.mean.update(batch[1])
        self.log("loss", value, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return value

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean)


# In windows of eight samples, cut into 3, 3 and 2.
GAPS = {
    "the last": (14, 15),
    "the first": (8, 9, 10),
    "one between": (11, 12, 13),
    "all but the first": (11, 12, 13, 14, 15),
    "all but the last": (8, 9, 10, 11, 12, 13),
    "the first of all": (0, 1, 2),
    "of each window another": (1, 3, 4, 5, 8, 9, 10, 22, 23),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("data", "collate"),
    [(Broken, none_if_empty), (Broken, filtered), (Marked, keep_good), (Shaken, none_if_empty)],
    ids=["none", "error", "marked", "shaken"],
)
def test_a_micro_batch_of_which_nothing_is_left_weighs_nothing(data: Any, collate: Any, workers: int) -> None:
    """Though Lightning skips a batch that is ``None``, and such a function fails if nothing is left."""
    gaps = [*GAPS.values()][-3 if workers else 0 :]
    for gap in gaps:
        loader = DataLoader(data(24, gap), 8, collate_fn=collate, num_workers=workers)
        stock, stock_trainer = fit(loader, max_epochs=2, module=Told())
        accumulate = AutoAccumulate(micro_batch_size=3)
        ours, trainer = fit(loader, accumulate, max_epochs=2, module=Told())
        assert worst_error(ours.gradients, stock.gradients) <= 1e-9
        assert ours.windows == stock.windows
        for name in ("loss_step", "loss_epoch", "mean"):
            assert float(trainer.callback_metrics[name]) == pytest.approx(
                float(stock_trainer.callback_metrics[name]), abs=1e-6
            )
        assert accumulate.exactness is not None
        assert accumulate.exactness.cause == "exact"


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Broken, Shaken])
def test_a_window_of_which_nothing_is_left_has_no_step(data: Any, workers: int) -> None:
    """As in stock Lightning, which skips such a batch; also if it is the first or the last."""
    for gap in [range(8), range(8, 16), range(14, 24)][2 if workers else 0 :]:
        loader = DataLoader(data(24, gap), 8, collate_fn=none_if_empty, num_workers=workers)
        stock, _ = fit(loader)
        ours, _ = fit(loader, AutoAccumulate(micro_batch_size=3))
        assert worst_error(ours.gradients, stock.gradients) <= 1e-9


def test_a_sample_that_the_collate_function_refuses_is_not_left_out() -> None:
    """A batch of the recipe would raise the same error."""
    loader = DataLoader(Broken(24, [13]), 8, collate_fn=lambda samples: default_collate(samples))
    with pytest.raises(TypeError, match="NoneType"):
        fit(loader, AutoAccumulate(micro_batch_size=1))


def test_a_collate_function_that_needs_several_samples_leaves_out_none() -> None:
    """Its error on one alone is raised."""

    def with_its_neighbour(samples: list[Any]) -> Any:
        inputs, targets, indices = default_collate(samples)
        return (inputs + inputs[[*range(1, len(samples)), 0]] * (0.0 if samples[1] else 1.0)), targets, indices

    loader = DataLoader(Samples(9), 8, collate_fn=with_its_neighbour)
    with pytest.raises(IndexError):
        fit(loader, AutoAccumulate(micro_batch_size=3, verify=False))


class Wide(Regression):
    """Most of its memory is what it computes of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (
            super().training_step(batch, batch_idx)
            + 0.0 * (batch[0].repeat(1, 500) * self.net[0].weight[0, 0]).exp().mean()
        )


@pytest.mark.parametrize("collate", [none_if_empty, filtered])
def test_a_micro_batch_of_nothing_after_an_error(collate: Any) -> None:
    """Which halves micro-batches."""
    loader = DataLoader(Broken(48, (*range(12, 16), *range(24, 28), 30, 41)), 8, collate_fn=collate)
    stock, _ = fit(loader, module=Wide())
    with limit_memory("1GB") as meter:
        fit(loader, module=Wide())
    accumulate = AutoAccumulate(cache=False)
    with limit_memory(meter.peak_bytes // 2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, _ = fit(loader, accumulate, module=Wide())
    assert accumulate.oom_events
    assert {len(indices) for _, indices in ours.micro_batches} <= {1, 2, 3, 4}
    assert worst_error(ours.gradients, stock.gradients) <= 1e-9


def test_an_error_in_a_window_with_a_stand_in() -> None:
    """The window begins again in single samples, and what stands in for what is planned anew."""

    class Full(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(batch[0]) > 1 and 5 in batch[2].tolist():
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    loader = DataLoader(Broken(24, (0, 1, 2, 7, 8, 15)), 8, collate_fn=none_if_empty)
    stock, _ = fit(loader)
    with pytest.warns(UserWarning, match="Memory ran out"):
        ours, _ = fit(loader, AutoAccumulate(micro_batch_size=3, verify=False), module=Full())
    assert worst_error(ours.gradients, stock.gradients) <= 1e-9


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_has_the_same_stand_ins(workers: int, tmp_path: Path) -> None:
    """With a window of nothing before the second step or behind it; workers live on from epoch to epoch."""
    data = Broken(40, (14, 15, *range(16, 24), 27, 28, 29))
    loader = DataLoader(data, 8, collate_fn=none_if_empty, num_workers=workers, persistent_workers=workers > 0)
    whole, _ = fit(loader, AutoAccumulate(micro_batch_size=3), SaveAll(tmp_path))
    for step in [1, 2, 3, 5][: 2 if workers else 4]:
        resumed, _ = fit(loader, AutoAccumulate(micro_batch_size=3), ckpt_path=tmp_path / f"step{step}.ckpt")
        assert worst_error(resumed.gradients, whole.gradients[step:]) <= 1e-9


def by_number(batch: Any) -> int:
    return len(batch[0])


@pytest.mark.parametrize("collate", [none_if_empty, filtered])
def test_what_is_counted_in_a_micro_batch_of_nothing_is_nothing(collate: Any) -> None:
    """``normalize=`` is not asked."""
    loader = DataLoader(Broken(24, GAPS["of each window another"]), 8, collate_fn=collate)
    stock, _ = fit(loader)
    ours, _ = fit(loader, AutoAccumulate(micro_batch_size=3, normalize=by_number))
    assert worst_error(ours.gradients, stock.gradients) <= 1e-9


def test_without_weights_a_micro_batch_of_nothing_is_zero() -> None:
    """As stock Lightning would divide: by all micro-batches."""
    data = Broken(8, (6, 7))
    ours, _ = fit(
        DataLoader(data, 8, collate_fn=none_if_empty),
        AutoAccumulate(micro_batch_size=3, normalize=None, verify=False),
        max_epochs=1,
    )
    net = network()
    for rows in (slice(0, 3), slice(3, 6)):
        (loss(net, data.inputs[rows], data.targets[rows]) / 3).backward()
    assert worst_error(ours.gradients, [flat_gradient(net)]) <= 1e-9


def fitted_on_a_rank(broken: list[int], collate: Any, normalize: Any) -> Any:
    """What this rank records; windows of eight samples, in four micro-batches of one on each of two ranks."""
    loader = DataLoader(
        Broken(40, broken), 4, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(100)
    )
    module, _ = fit(loader, AutoAccumulate(micro_batch_size=1, normalize=normalize), max_epochs=1, **ddp())
    return module.gradients


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("collate", "normalize"), [(none_if_empty, "samples"), (filtered, "samples"), (none_if_empty, by_number)]
)
def test_ranks_of_which_one_has_nothing_left(collate: Any, normalize: Any, tmp_path: Path) -> None:
    """In the first micro-batch, between, in the last, and in whole windows, the first of all among them.

    Counting refuses a window in which there is nothing to count.
    """
    windows = cut(permutation(40, 100, 0), 8)
    gone = [(0, 1, 2, 3), (0, 2, 7), (4, 5, 6, 7), (1, 3, 4, 5), range(0 if callable(normalize) else 8)]
    broken = [window[place] for window, places in zip(windows, gone) for place in places]
    kept = [[index for index in window if index not in broken] for window in windows]
    oracle = plain_loop(Samples(40), filter(None, kept))
    for gradients in on_ranks(fitted_on_a_rank, tmp_path, broken, collate, normalize):
        assert worst_error(gradients[: len(oracle)], oracle) <= 1e-9
        assert not torch.stack(gradients)[len(oracle) :].any()  # nothing is left on any rank


class Grouped(Samples):
    """Sequences of one length in each batch of eight."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets, _ = super().__getitem__(index)
        return inputs.expand(2 + index // 8, -1), targets, index


class PadsLists(Samples):
    """Pads the samples of a list to the longest of it, as transforms of data sets by batch do."""

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows = [self.inputs[index].expand(1 + index * 7 % 5, -1) for index in indices]
        return list(zip(pad_sequence(rows, batch_first=True), self.targets[indices], indices))


class MixesLists(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        mixed = 0.7 * self.inputs[indices] + 0.3 * self.inputs[indices[::-1]]
        return list(zip(mixed, self.targets[indices], indices))


class ShortensLists(Samples):
    """Leaves out a quarter of its samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices if index % 4]


def stacked(batch: list[Any]) -> Any:
    inputs, targets, indices = zip(*batch)
    return torch.stack(inputs), torch.stack(targets), torch.tensor(indices)


def first_six(batch: list[Any]) -> Any:
    return default_collate(batch[:6])


class OfSequences(Regression):
    """The mean over the steps of a sequence; runs out of memory in the second step, once, if asked to."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails and self.global_step == 1:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory.")
        inputs, targets, _ = batch
        outputs = self.net(inputs)
        if outputs.ndim == 3:
            outputs = outputs.mean(1)
        return (outputs - targets).square().mean()


@pytest.mark.filterwarnings("ignore:Memory ran out in training")
@pytest.mark.parametrize(
    ("arguments", "factor", "fails"),
    [
        ({}, 1, False),
        ({}, 2, False),
        ({}, 1, True),
        ({"micro_batch_size": 3}, 1, False),
        ({"effective_batch_size": 16}, 2, False),
        ({"micro_batch_size": 3, "micro_batching": "step"}, 1, False),
        ({"micro_batching": "step"}, 1, True),
    ],
)
@pytest.mark.parametrize(
    ("data", "collate"),
    [
        (Grouped(48), None),
        (Grouped(48), stacked),
        (PadsLists(48), None),
        (MixesLists(48), None),
        (ShortensLists(48), None),
        (Samples(48), first_six),
    ],
    ids=["grouped", "grouped, own", "pads", "mixes", "leaves out", "six"],
)
def test_data_of_which_only_the_loaders_batches_are_right(
    data: Any, collate: Any, arguments: dict[str, Any], factor: int, fails: bool
) -> None:
    """These are cut in the step, also after an error."""
    loader = DataLoader(data, 8, collate_fn=collate)
    stock, _ = fit(loader, module=OfSequences(fails=False), accumulate_grad_batches=factor, max_epochs=1)
    accumulate = AutoAccumulate(cache=False, **arguments)
    given = 1 if "effective_batch_size" in arguments else factor
    ours, _ = fit(loader, accumulate, module=OfSequences(fails=fails), accumulate_grad_batches=given, max_epochs=1)
    assert worst_error(ours.gradients, stock.gradients) <= 1e-9
    assert ours.fails is False
    if "micro_batch_size" in arguments or fails:
        assert accumulate.exactness is not None
        assert accumulate.exactness.cause == "exact"


class ShortensFewLists(ShortensLists):
    """Leaves out samples that are not among those that are read before training."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices if index not in (5, 6, 22)]


def test_samples_that_a_list_lacks_weigh_nothing() -> None:
    """Also if none of those read before training was left out, so that the loader cuts."""
    loader = DataLoader(ShortensFewLists(48), 8)
    stock, _ = fit(loader, max_epochs=1)
    accumulate = AutoAccumulate(micro_batch_size=3, cache=False)
    ours, _ = fit(loader, accumulate, max_epochs=1)
    assert [len(indices) for _, indices in ours.micro_batches[:6]] == [3, 2, 1, 3, 3, 2]
    assert worst_error(ours.gradients, stock.gradients) <= 1e-9


class LacksThree(ShortensLists):
    """Leaves out three samples that follow each other, and were not read before training."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices if index not in (3, 4, 5)]


def test_a_micro_batch_of_which_a_list_lacks_all_samples_weighs_nothing() -> None:
    """With torch's own collate function, too: the batches of the recipe have samples left."""
    loader = DataLoader(LacksThree(48), 8)
    stock, _ = fit(loader, max_epochs=1)
    ours, _ = fit(loader, AutoAccumulate(micro_batch_size=3, cache=False), max_epochs=1)
    assert worst_error(ours.gradients, stock.gradients) <= 1e-9


class RandomGrouped(Grouped):
    """Draws random numbers that cannot be put back."""

    def __getitem__(self, index: int) -> Any:
        inputs, *others = super().__getitem__(index)
        return inputs + np.random.default_rng().random(), *others


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_samples_of_two_batches_names_the_cut(workers: int) -> None:
    """If they are not read before training, which cannot be seen."""
    loader = DataLoader(RandomGrouped(48), 8, num_workers=workers)
    with pytest.raises(RuntimeError, match="stack expects each tensor") as caught:
        fit(loader, AutoAccumulate(cache=False), module=OfSequences(fails=False), accumulate_grad_batches=2)
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert 'AutoAccumulate(micro_batching="step")' in told
    accumulate = AutoAccumulate(cache=False, micro_batching="step")
    fit(loader, accumulate, module=OfSequences(fails=False), accumulate_grad_batches=2)
