import functools

import pytest
import torch
from lightning.pytorch import Trainer
from reference import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import UserError
from lightning_ga.models import Classifier, MLPClassifier
from lightning_ga.models.schedules import warmup_cosine


def samples(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 1, 4, 4, generator=generator)
    return TensorDataset(images, torch.arange(count) % 3)


def train(model: Classifier, batch_size: int, factor: int, epochs: int = 1) -> Trainer:
    trainer = quiet_trainer(max_epochs=epochs, accumulate_grad_batches=factor, num_sanity_val_steps=2)
    loader = DataLoader(samples(), batch_size=batch_size)
    trainer.fit(model, loader, loader)
    return trainer


def small(**arguments) -> MLPClassifier:
    torch.manual_seed(0)
    return MLPClassifier([8], num_classes=3, image_size=4, **arguments)


def test_the_training_curve_is_that_of_whole_windows():
    whole = train(small(), batch_size=8, factor=1).callback_metrics
    parts = train(small(), batch_size=2, factor=4).callback_metrics
    assert parts["train/loss"] == pytest.approx(whole["train/loss"].item(), rel=1e-5)
    assert parts["train/acc"] == whole["train/acc"]


def test_the_cosine_rises_falls_and_stays_down():
    """A tenth of the steps up, then down to the final share."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = warmup_cosine(optimizer, 20, warmup=0.1, final=0.01)
    rates = []
    for _ in range(25):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:21] == sorted(rates[2:21], reverse=True)
    assert rates[20:] == pytest.approx([0.01] * 5)


def test_a_test_counts_the_confusion_matrix():
    model = small()
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    for _ in range(2):
        (metrics,) = trainer.test(model, DataLoader(samples(), batch_size=5), verbose=False)
        assert sum(map(sum, model.confusion)) == 24
        assert sum(model.confusion[i][i] for i in range(3)) / 24 == pytest.approx(metrics["test/acc"])


def test_a_checkpoint_brings_back_model_and_arguments(tmp_path):
    """load_from_checkpoint needs neither a configuration nor anything but plain values."""
    model = small()
    trainer = train(model, batch_size=8, factor=1)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
    loaded = MLPClassifier.load_from_checkpoint(path, weights_only=True)
    images = torch.randn(2, 1, 4, 4)
    assert torch.equal(loaded(images), model(images))


def test_labels_are_smoothed_in_training_alone():
    """The loss of validation stays comparable."""
    plain, smooth = small(), small(label_smoothing=0.3)
    metrics = [train(model, batch_size=24, factor=1).callback_metrics for model in (plain, smooth)]
    images, targets = samples().tensors
    with torch.no_grad():
        expected = nn.functional.cross_entropy(small()(images), targets, label_smoothing=0.3)
    assert metrics[1]["train/loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics[0]["train/loss"] != metrics[1]["train/loss"]
    assert metrics[1]["val/loss"].item() == pytest.approx(
        nn.functional.cross_entropy(smooth(images), targets).item(), rel=1e-5
    )


def test_targets_may_be_probabilities():
    """As mixup makes them: the accuracy is that of the likelier class."""
    images, targets = samples().tensors
    mixed = TensorDataset(images, 0.7 * nn.functional.one_hot(targets, 3) + 0.1)
    model = small()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(model, DataLoader(mixed, batch_size=24), DataLoader(samples(), batch_size=24))
    predicted = small()(images).argmax(dim=1)
    assert trainer.callback_metrics["train/acc"].item() == pytest.approx((predicted == targets).float().mean().item())


def test_norms_and_biases_may_be_left_without_weight_decay():
    """By timm's groups; without the setting there is one group of all."""
    optimizer = functools.partial(torch.optim.AdamW, weight_decay=0.05)
    model = small(optimizer=optimizer)
    assert len(train(model, batch_size=24, factor=1).optimizers[0].param_groups) == 1
    model = small(optimizer=optimizer)
    model.decay_norms = False
    groups = train(model, batch_size=24, factor=1).optimizers[0].param_groups
    for group, decay, dimensions in zip(groups, (0.0, 0.05), (1, 2)):
        assert group["weight_decay"] == decay
        assert {parameter.dim() for parameter in group["params"]} == {dimensions}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_a_checkpoint_with_other_groups_is_refused(tmp_path):
    """In a sentence, where the optimizer would fail; a test takes it."""
    optimizer = functools.partial(torch.optim.AdamW, weight_decay=0.05)
    trainer = train(small(optimizer=optimizer), batch_size=24, factor=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model, loader = small(optimizer=optimizer), DataLoader(samples(), batch_size=24)
    model.decay_norms = False
    again = quiet_trainer(max_epochs=2)
    with pytest.raises(
        UserError, match="has parameters in 1 group, this training in 2: give the optimizer.decay_norms"
    ):
        again.fit(model, loader, loader, ckpt_path=tmp_path / "a.ckpt")
    again.test(model, loader, ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_an_optimizer_without_weight_decay_is_refused():
    model = small(optimizer=torch.optim.LBFGS)
    model.decay_norms = False
    with pytest.raises(UserError, match="needs an optimizer that has a weight_decay"):
        model.parameter_groups()
