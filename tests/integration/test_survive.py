"""Memory runs out at every place of a training step: the run goes on, and no gradient changes."""

import warnings
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from faults import Arm, Faults
from reference import FEATURES, Regression, Samples, fit, loss, quiet_trainer, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.snapshot.savepoint import Savepoint

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
MODES = pytest.mark.parametrize("mode", ["loader", "step"])


class Watched(Regression):
    """Logs, has a metric, and running statistics that a failed attempt must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tracked", torch.zeros((), dtype=torch.int64))
        self.error = torchmetrics.MeanSquaredError()
        self.outputs: list[Any] = []
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets, _ = batch
        self.tracked += 1
        self.sizes.append(len(inputs))
        predicted = self.net(inputs)
        self.error(predicted, targets)
        value = torch.nn.functional.mse_loss(predicted, targets)
        self.log("loss", value, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        return {"loss": value, "predicted": predicted.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append((batch_idx, outputs["predicted"], outputs["loss"]))


class Logged(pl.Callback):
    """Everything that was logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append({k: float(v) for k, v in trainer._results.metrics(on_step=True)["callback"].items()})

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.epochs.append({k: float(v) for k, v in trainer._results.metrics(on_step=False)["callback"].items()})


def train(
    *at: int, mode: str = "loader", samples: int = 37, module: Any = None, epochs: int = 2, **arguments: Any
) -> Any:
    """A fit with memory running out at these operations."""
    faults, logged = Faults(*at), Logged()
    accumulate = {"effective_batch_size": 16, "micro_batch_size": 8 if mode == "loader" else 5, **arguments}
    callback = AutoAccumulate(**accumulate, micro_batching=mode, verify=False)
    module = Watched() if module is None else module
    loader = DataLoader(Samples(samples), batch_size=8, shuffle=True)
    with faults:
        fit(loader, callback, Arm(faults), logged, module=module, max_epochs=epochs)
    return module, callback, faults, logged


def close(ours: Any, theirs: Any, rtol: float = 1e-9) -> None:
    """Logged values are kept in fp32."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 1000)


@MODES
def test_memory_runs_out_all_over_a_window(mode: str) -> None:
    """Forward, loss and backward, in first and later micro-batches: gradients, weights, logs and metrics are equal."""
    whole, _, counted, logs = train(mode=mode, epochs=1)
    operations = counted.count
    assert operations > 100
    for at in [*range(1, operations // 3, 29), *range(operations // 3, operations, 197)]:
        module, callback, _, logged = train(at, mode=mode, epochs=1)
        assert callback.oom_events == 1, at
        assert worst_error(module.gradients, whole.gradients) <= 1e-12, at
        close(list(module.parameters()), list(whole.parameters()))
        close(logged.epochs, logs.epochs, 1e-6)
        if mode == "step":
            close(logged.steps, logs.steps, 1e-6)
            close(module.outputs, whole.outputs)
        assert int(module.error._update_count) == int(whole.error._update_count)


@MODES
@pytest.mark.parametrize("window", [1, 2, 3])
def test_memory_runs_out_where_the_state_of_a_window_is_copied(
    window: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take memory, too: nothing has run yet, so they are made once more when caches are emptied."""
    whole, _, _, _ = train(mode=mode, epochs=1)
    take, calls = Savepoint.take, []

    def fails_once(savepoint: Savepoint) -> None:
        calls.append(None)
        if len(calls) == window:
            raise torch.OutOfMemoryError("CUDA out of memory, in a copy.")
        take(savepoint)

    monkeypatch.setattr(Savepoint, "take", fails_once)
    module, callback, _, _ = train(mode=mode, epochs=1)
    assert (callback.oom_events, len(calls) >= window + 1) == (0, True)  # no pass has failed
    assert worst_error(module.gradients, whole.gradients) <= 1e-12


def test_it_says_so_once_and_raises_where_that_is_asked_for() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(2)
    assert sum("Memory ran out" in str(warning.message) for warning in caught) == 1
    with pytest.raises(torch.OutOfMemoryError):
        train(2, on_oom="raise")


def test_one_sample_that_does_not_fit_ends_in_a_sentence() -> None:
    """Its shapes, the memory, and three ways out."""

    class Huge(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError) as caught:
        train(module=Huge())
    message = str(caught.value)
    assert "one sample alone" in message
    assert f"({FEATURES},)" in message.replace(f"(1, {FEATURES})", f"({FEATURES},)")
    for way_out in ("precision", "checkpointing", "memory_budget"):
        assert way_out in message


class Evaluated(Regression):
    """Validation, test and prediction that run out of memory above some size, as may the way to the device."""

    def __init__(self, most: int = 3, travels: int = 1000) -> None:
        super().__init__()
        self.most, self.travels = most, travels
        self.error = torchmetrics.MeanSquaredError()
        self.sizes: list[int] = []
        self.seen: list[Any] = []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.fit(batch, self.travels)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def fit(self, batch: Any, most: int) -> None:
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def evaluate(self, batch: Any, name: str) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        predicted = self.net(batch[0])
        self.error(predicted, batch[1])
        self.log(f"{name}/loss", torch.nn.functional.mse_loss(predicted, batch[1]))
        self.log(f"{name}/error", self.error)
        self.fit(batch, self.most)
        return predicted

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.evaluate(batch, "val")

    def test_step(self, batch: Any) -> torch.Tensor:
        return self.evaluate(batch, "test")

    def predict_step(self, batch: Any) -> torch.Tensor:
        self.fit(batch, self.most)
        return self.net(batch[0])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)


@pytest.mark.parametrize("most", [{"most": 3}, {"most": 1000, "travels": 2}], ids=["step", "transfer"])
def test_validation_test_and_prediction_run_in_pieces(most: dict[str, int]) -> None:
    """What they log and return is that of whole batches; steps need not take the number of their batch."""
    loader = DataLoader(Samples(20), batch_size=8)
    results = []
    for module in (Evaluated(**most), Evaluated(1000)):
        callback = AutoAccumulate()
        trainer = quiet_trainer(callback)
        logged = trainer.validate(module, loader, verbose=False), trainer.test(module, loader, verbose=False)
        results.append((*logged, module.seen, trainer.predict(module, loader)))
        assert callback.oom_events == (0 if module.most == module.travels else 3)
        if module.most == 3:
            assert module.sizes[:6] == [8, 4, 2, 2, 2, 2]
            assert max(module.sizes[6:]) == 8  # the first batch of the test
    close(*results, 1e-6)


class Counts:
    """What an allocator counts: an error in validation shows there, too."""

    risen = False

    def __init__(self, device: torch.device) -> None:
        Counts.risen = False

    def struggles(self) -> bool:
        return Counts.risen

    def begin_again(self) -> None:
        Counts.risen = False


STRUGGLES: list[tuple[str, Any, str]] = [
    ("validation", None, ""),
    ("training", None, "to go on with 8 samples, .* no pass has more than 7"),
    ("training", lambda data, index: 1, "with 8 of the longest samples, .* more than 7 of the longest samples, or as"),
]


@pytest.mark.parametrize(("where", "size_of", "told"), STRUGGLES)
def test_what_an_evaluation_survives_makes_training_no_smaller(
    where: str, size_of: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a struggle of the allocator in training does, which says so."""
    monkeypatch.setattr("lightning_ga.fit.engine.RetryWatch", Counts)

    class Struggling(Evaluated):
        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            Counts.risen |= where == "validation" and len(batch[0]) > self.most
            return super().validation_step(batch, batch_idx)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            Counts.risen |= where == "training" and self.global_step == 0
            return loss(self.net, batch[0], batch[1])

    callback, data = AutoAccumulate(micro_batch_size=8, size_of=size_of), DataLoader(Samples(20), batch_size=8)
    with pytest.warns(UserWarning, match=told) if told else nullcontext():
        quiet_trainer(callback, num_sanity_val_steps=0, max_epochs=3).fit(Struggling(), data, data)
    assert callback.oom_events == 1
    assert (callback.plan.micro_batch_size == 8) == (where == "validation")


@pytest.mark.parametrize("call", [0, 2, 3, 8])
def test_batches_that_do_not_fit_on_the_device_travel_in_pieces(call: int) -> None:
    """If one of these does not reach it either, those before it stay counted, and add to gradients once."""

    class Moved(Regression):
        calls = 0

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            self.calls += len(batch[0]) <= 4
            if len(batch[0]) > 4 or (self.calls == call and len(batch[0]) > 1):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return batch

    module, callback, _, _ = train(module=Moved())
    whole, _, _, _ = train(module=Regression())
    assert callback.oom_events >= 1
    assert worst_error(module.gradients, whole.gradients) <= 1e-12


def test_checkpoints_keep_the_count_and_the_limit(tmp_path: Any) -> None:
    faults = Faults(2)
    loader = DataLoader(Samples(37), batch_size=8)
    first = AutoAccumulate(16, micro_batch_size=8, verify=False)
    with faults:
        _, trainer = fit(loader, first, Arm(faults), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    second = AutoAccumulate(16, micro_batch_size=8, verify=False)
    fit(loader, second, ckpt_path=tmp_path / "run.ckpt", max_epochs=2)
    assert second.oom_events == 1
    assert second.plan.micro_batch_size == 4
