"""Memory runs out in evaluation: the batch runs again in pieces. The oracle is the same evaluation without an error."""

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from reference import FEATURES, network, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.snapshot import kept_batch
from lightning_ga.testing import out_of_memory_at

pytestmark = [
    pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning"),  # names have lengths, too
]
BATCH, ALL = 8, 10**9


class Rows(Dataset):
    """A batch is a dictionary of rows, their labels and names."""

    def __init__(self, size: int = 20) -> None:
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sum(0, keepdim=True), "name": f"row {index}"}


class Evaluated(pl.LightningModule):
    """Memory runs out at the end of the steps of more samples than fit."""

    def __init__(self, *, fits: int = ALL) -> None:
        super().__init__()
        self.net, self.fits = network(), fits
        self.register_buffer("samples", torch.zeros(()))
        self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        self.gathered: list[Tensor] = []
        self.returned: list[Any] = []
        self.sizes: list[int] = []

    def check(self, batch: Any) -> None:
        if len(batch["inputs"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        labels, names = batch.pop("labels"), batch["name"]
        predicted = self.net(batch["inputs"])
        self.samples += len(predicted)
        self.error(predicted, labels)
        self.gathered.append(predicted)
        loss = torch.nn.functional.mse_loss(predicted, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", predicted.max(), reduce_fx="max")
        self.log("sized", loss, batch_size=len(predicted))
        self.log("error", self.error)
        self.sizes.append(len(predicted))
        self.check(batch)
        return {"loss": loss, "predicted": predicted, "names": names, "count": len(predicted)}

    test_step = predict_step = validation_step

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.returned.append(outputs)

    on_test_batch_end = on_validation_batch_end


class PredictsOnly(Evaluated):
    """Prediction logs nothing."""

    def predict_step(self, batch: Any, *_: Any) -> dict[str, Any]:
        self.check(batch)
        return {"predicted": self.net(batch["inputs"]), "names": batch.pop("name")}


def loader_of_rows(size: int = 20, **settings: Any) -> DataLoader:
    return DataLoader(Rows(size), batch_size=BATCH, **settings)


def evaluated(module: Evaluated, stage: str, data: Any, *callbacks: Any, **settings: Any) -> list[Any]:
    """Everything that an evaluation leaves behind."""
    logged = getattr(quiet_trainer(*callbacks, **settings), stage)(module, data, verbose=False)
    numbers = lambda names: [int(name.removeprefix("row ")) for name in names]  # noqa: E731
    returned = [{**each, "names": numbers(each["names"])} for each in module.returned]
    return [logged, returned, torch.cat(module.gathered), module.samples]


def close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-12)  # Lightning logs in single precision


@pytest.mark.parametrize(("stage", "inference_mode"), [("validate", True), ("test", False)])
def test_an_evaluation_in_pieces_is_that_of_whole_batches(stage: str, inference_mode: bool) -> None:
    """What is logged and returned, metrics, buffers and lists: each sample counts once."""
    ours, module = AutoAccumulate(), Evaluated(fits=3)
    settings = {"inference_mode": inference_mode}
    close(
        evaluated(module, stage, loader_of_rows(), ours, **settings),
        evaluated(Evaluated(), stage, loader_of_rows(), **settings),
    )
    assert module.sizes == 10 * [2]  # those of failed attempts are taken back
    assert ours.oom_events == 2  # of one batch: eight samples and four
    assert "loss" in module.returned[0]


def test_predictions_in_pieces_are_those_of_whole_batches() -> None:
    found = [
        quiet_trainer(AutoAccumulate()).predict(module, [loader_of_rows(), loader_of_rows(9)])
        for module in (PredictsOnly(fits=3), PredictsOnly())
    ]
    close(*[[[batch["predicted"] for batch in batches] for batches in each] for each in found])
    assert found[0][0][2]["names"] == [f"row {index}" for index in range(16, 20)]


def test_several_loaders_and_data_workers() -> None:
    """Each loader has a limit of its own; what is logged keeps them apart."""
    found = [
        evaluated(
            module,
            "validate",
            [loader_of_rows(12, num_workers=1, persistent_workers=True), loader_of_rows(5)],
            *callbacks,
        )
        for module, callbacks in ((Evaluated(fits=4), [AutoAccumulate()]), (Evaluated(), []))
    ]
    close(*found)


def test_a_fit_is_validated_in_pieces() -> None:
    """Whatever validation survives, training is not cut."""

    class Trained(Evaluated):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.nn.functional.mse_loss(self.net(batch["inputs"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    left = []
    for module, callbacks in ((Trained(fits=3), [AutoAccumulate(verify=False)]), (Trained(), [])):
        trainer = quiet_trainer(*callbacks, num_sanity_val_steps=1)
        trainer.fit(module, loader_of_rows(), loader_of_rows(12))
        metrics = {name: value for name, value in trainer.callback_metrics.items() if "chunk" not in name}
        left.append([*module.net.parameters(), metrics, module.samples])
        assert not callbacks or callbacks[0].plan.factor == 1
    close(*left)


def test_memory_runs_out_at_any_operation() -> None:
    """Of the step, and of what puts together what pieces have logged and returned."""
    expected, survived = evaluated(Evaluated(), "validate", loader_of_rows(8)), 0
    for operation in range(1, 4000, 79):
        counter, ours = out_of_memory_at(operation), AutoAccumulate()

        class Counting(Evaluated):
            def on_validation_batch_start(self, *_: Any) -> None:
                counter.__enter__()  # noqa: B023

            def on_validation_batch_end(self, *arguments: Any) -> None:
                counter.__exit__(None, None, None)  # noqa: B023
                super().on_validation_batch_end(*arguments)

        close(evaluated(Counting(fits=4), "validate", loader_of_rows(8), ours), expected)
        survived += ours.oom_events
        if counter.operations < operation:
            break
    assert survived > 3
    assert counter.operations < operation


def test_one_sample_that_does_not_fit_ends_in_a_sentence() -> None:
    """And if that is asked for, the first error ends the run."""
    with pytest.raises(UserError, match="Memory ran out in validation with one sample alone .* nothing left to split"):
        evaluated(Evaluated(fits=0), "validate", loader_of_rows(), AutoAccumulate())
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(Evaluated(fits=3), "validate", loader_of_rows(), AutoAccumulate(on_oom="raise"))


def told_by(module: Evaluated, stage: str, data: Any) -> list[tuple[int, int]]:
    """Of each warning: the samples that failed, and the most of a pass from then on."""
    ours = AutoAccumulate()
    with pytest.warns(UserWarning, match="values are merged by samples") as told:
        evaluated(module, stage, data, ours)
    found = [re.search(r"with (\d+) samples .* at most (\d+) samples", str(each.message)) for each in told]
    sizes = [(int(each[1]), int(each[2])) for each in found if each is not None]
    assert ours.oom_events == len(sizes)
    return sizes


def test_each_error_that_was_survived_is_told() -> None:
    """Also if one batch was halved several times; later batches begin with what is known."""
    assert told_by(Evaluated(fits=3), "test", loader_of_rows()) == [(8, 4), (4, 2)]
    of_loaders = told_by(Evaluated(fits=1), "validate", [loader_of_rows(9), loader_of_rows(4)])
    assert of_loaders == [(8, 4), (4, 2), (2, 1), (4, 2), (2, 1)]


class FailsIf(Evaluated):
    """Memory runs out if ``fails(batch_idx, rows)``."""

    def __init__(self, fails: Callable[[int, list[int]], bool]) -> None:
        super().__init__()
        self.fails = fails

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.batch_idx = batch_idx
        return super().validation_step(batch, batch_idx, dataloader_idx)

    test_step = predict_step = validation_step

    def check(self, batch: Any) -> None:
        if self.fails(self.batch_idx, [int(name.removeprefix("row ")) for name in batch["name"]]):
            raise torch.OutOfMemoryError("CUDA out of memory")


def batches_of(*sizes: int) -> DataLoader:
    """A loader of batches of these sizes."""
    ends = [*accumulate(sizes)]
    return DataLoader(Rows(ends[-1]), batch_sampler=[range(end - size, end) for size, end in zip(sizes, ends)])


@pytest.mark.parametrize(
    ("sizes", "fails", "told"),
    [
        # 256 = 86 + 85 + 85 within 119
        ((238, 256), lambda batch, rows: len(rows) > (119, 60)[batch], [(238, 119), (86, 43)]),
        # 256 = 86 + 85 + 85 again: memory runs out with the last piece
        ((238, 256), lambda batch, rows: len(rows) > 119 or (len(rows) > 50 and 493 in rows), [(238, 119), (85, 43)]),
        # 5 = 3 + 2
        ((6, 5), lambda batch, rows: len(rows) > 3 or (len(rows) > 1 and 10 in rows), [(6, 3), (2, 1)]),
        # 4 = 2 + 2 within 3
        ((6, 4), lambda batch, rows: len(rows) > (3, 1)[batch], [(6, 3), (2, 1)]),
    ],
)
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_pass_that_failed_is_halved(
    stage: str, sizes: tuple[int, int], fails: Any, told: list[tuple[int, int]]
) -> None:
    """Not the limit, which may be larger: pieces are near-equal."""
    module = FailsIf(fails)
    assert told_by(module, stage, batches_of(*sizes)) == told
    assert max(map(len, module.gathered)) == told[0][1]
    assert max(len(predicted) for predicted in module.gathered if len(predicted) <= told[1][1]) == told[1][1]


def test_a_short_last_piece_that_fails_once_ends_nothing() -> None:
    """5 = 2 + 2 + 1, and memory runs out with the one: beside pieces of one sample there may be room for it."""
    failed: list[int] = []

    def fails(batch: int, rows: list[int]) -> bool:
        if rows == [8] and not failed:
            failed.append(8)
            return True
        return len(rows) > 2

    assert told_by(FailsIf(fails), "validate", batches_of(4, 5)) == [(4, 2), (2, 1)]
    assert failed == [8]


class Normalizes(Evaluated):
    """Changes its batch in place, as some steps do to save memory."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        batch["inputs"].sub_(0.5).mul_(2)
        batch["labels"][:, 0] += 1
        return super().validation_step(batch, batch_idx, dataloader_idx)

    test_step = predict_step = validation_step


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_step_may_change_a_small_batch_in_place(stage: str, workers: int) -> None:
    """In inference mode, in which evaluation runs, it is put back; also after a later error, when pieces have run."""
    data = [loader_of_rows(20, num_workers=workers), loader_of_rows(9, num_workers=workers)]
    for fits in (4, 2):
        close(evaluated(Normalizes(fits=fits), stage, data, AutoAccumulate()), evaluated(Normalizes(), stage, data))


def test_predictions_of_batches_that_are_changed_in_place() -> None:
    class Predicts(PredictsOnly):
        def predict_step(self, batch: Any, *given: Any) -> Any:
            batch["inputs"].sub_(0.5).mul_(2)
            return super().predict_step(batch, *given)

    found = [
        quiet_trainer(AutoAccumulate()).predict(module, loader_of_rows(20)) for module in (Predicts(fits=1), Predicts())
    ]
    close(*[[each["predicted"] for each in batches] for batches in found])


IN_PLACE = "the step had changed a tensor of its batch in place, or the loader had, and the batch cannot be read again"


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_large_batch_that_was_changed_in_place_ends_the_run(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is kept of it; one that is not changed runs again."""
    monkeypatch.setattr(kept_batch, "SMALL", 100)
    with pytest.raises(UserError, match=IN_PLACE):
        evaluated(Normalizes(fits=3), stage, loader_of_rows(), AutoAccumulate())
    close(
        evaluated(Evaluated(fits=3), stage, loader_of_rows(), AutoAccumulate()),
        evaluated(Evaluated(), stage, loader_of_rows()),
    )


def test_a_batch_with_versions_that_was_changed_in_place_ends_the_run() -> None:
    """Without inference mode, or if batches are ready-made; as in training."""
    ready_made = DataLoader([*loader_of_rows()], batch_size=None)
    for data, settings in ((loader_of_rows(), {"inference_mode": False}), (ready_made, {})):
        with pytest.raises(UserError, match=IN_PLACE):
            evaluated(Normalizes(fits=3), "validate", data, AutoAccumulate(), **settings)
    close(
        evaluated(Evaluated(fits=3), "test", ready_made, AutoAccumulate()), evaluated(Evaluated(), "test", ready_made)
    )


class Totals(Evaluated):
    """Adds up in attributes: tensors that are made as an evaluation begins."""

    def on_validation_epoch_start(self) -> None:
        self.total, self.totals = torch.zeros(()), {"rows": torch.zeros(2)}

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.total += len(batch["inputs"])
        self.totals["rows"][1] += len(batch["inputs"])
        return super().validation_step(batch, batch_idx, dataloader_idx)

    test_step = validation_step


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_attributes_that_a_step_adds_to_in_place(stage: str, inference_mode: bool) -> None:
    """Each sample counts once, also if the tensors are of inference mode."""
    module = Totals(fits=3)
    evaluated(module, stage, loader_of_rows(), AutoAccumulate(), inference_mode=inference_mode)
    assert module.total == 20
    assert module.totals["rows"].tolist() == [0, 20]


def test_weights_that_a_step_moves_are_named() -> None:
    class Moves(Evaluated):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.net[0].weight.mul_(2)
            return super().validation_step(batch, batch_idx)

    with pytest.raises(UserError, match="the step had changed net.0.weight"):
        evaluated(Moves(fits=3), "validate", loader_of_rows(), AutoAccumulate())


def test_loaders_that_are_loaded_again_are_cut_by_their_own_samples() -> None:
    """The limit stays; where samples lie, and the dataset itself, do not."""

    class Transposed(pl.LightningModule):
        """Its validation data have samples on another axis in each epoch."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.shapes: list[tuple[int, ...]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.nn.functional.mse_loss(self.net(batch["inputs"]), batch["labels"])

        def val_dataloader(self) -> DataLoader:
            axis = self.current_epoch % 2

            def collate(rows: list[dict[str, Any]]) -> Tensor:
                return torch.stack([row["inputs"] for row in rows], axis)

            return DataLoader(Rows(8), batch_size=BATCH, collate_fn=collate)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.shapes.append(tuple(batch.shape))
            if max(batch.shape) > max(4, FEATURES):
                raise torch.OutOfMemoryError("CUDA out of memory")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Transposed()
    trainer = quiet_trainer(AutoAccumulate(verify=False), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, loader_of_rows())
    assert module.shapes == [(4, FEATURES), (4, FEATURES), (FEATURES, 4), (FEATURES, 4)]


class Unlike(Evaluated):
    """Memory runs out in the first batch."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 and len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch["x"].mean()


def test_a_later_batch_that_cannot_be_cut_runs_whole() -> None:
    """It fits: an error of an earlier one says nothing of it."""
    batches = [{"x": torch.ones(8, 1), "y": torch.ones(8)}, {"x": torch.ones(3, 1), "y": torch.ones(2)}]
    with pytest.warns(UserWarning, match="Memory ran out in test with 8 samples"):
        quiet_trainer(AutoAccumulate()).test(Unlike(), DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
