from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from reference import Curves, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate
from lightning_ga.models import Classifier, HashedPatchClassifier, MLPClassifier
from lightning_ga.models.classifier import HashedPatches
from lightning_ga.models.schedules import warmup_cosine


def samples(count: int = 24) -> TensorDataset:
    images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(count) % 3)


def train_classifier(model: Classifier, batch_size: int = 24, data: TensorDataset | None = None) -> Trainer:
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=2)
    trainer.fit(model, *(DataLoader(each, batch_size=batch_size) for each in (data or samples(), samples())))
    return trainer


def small(**arguments) -> MLPClassifier:
    torch.manual_seed(0)
    return MLPClassifier([8], num_classes=3, image_size=4, **arguments)


def test_the_cosine_rises_falls_and_stays_down():
    """A tenth of the steps up, then down to the final share."""
    scheduler = warmup_cosine(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), 20, warmup=0.1, final=0.01)
    rates = [scheduler.lr_lambdas[0](step) for step in range(25)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:21] == sorted(rates[2:21], reverse=True)
    assert rates[20:] == pytest.approx([0.01] * 5)


@pytest.mark.parametrize("callbacks", [[], [AutoAccumulate(micro_batch_size=2, verify=False)]])
@pytest.mark.parametrize("end", [{}, {"max_steps": 5}, {"max_epochs": -1, "max_steps": 5}])
def test_epochs_of_warmup_have_the_steps_of_an_epoch(callbacks, end):
    """Also if a number of steps ends the run."""
    model = small(lr_scheduler=partial(warmup_cosine, warmup_epochs=1))
    loader = DataLoader(samples(), batch_size=6)  # four steps
    quiet_trainer(*callbacks, **end).fit(model, loader, loader)
    factor = model.lr_schedulers().lr_lambdas[0]
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_a_test_counts_the_confusion_matrix():
    """Anew each time; its diagonal is the accuracy, which knows that larger is better."""
    model, trainer = small(), quiet_trainer()
    for _ in range(2):
        (metrics,) = trainer.test(model, DataLoader(samples(), batch_size=5), verbose=False)
        assert sum(map(sum, model.confusion)) == 24
        assert sum(model.confusion[i][i] for i in range(3)) / 24 == pytest.approx(metrics["test/acc"])
    assert metrics["test/top5"] == 1  # of three classes
    assert model.test_accuracy["acc"].higher_is_better


def test_a_prediction_says_that_it_is_class_probabilities():
    model, images = small().eval(), samples().tensors[0]
    outputs = quiet_trainer().predict(model, DataLoader(samples(), batch_size=24))
    torch.testing.assert_close(outputs[0]["class_probabilities"], model(images).softmax(dim=1).detach())


def test_a_checkpoint_brings_back_model_and_arguments(tmp_path):
    """load_from_checkpoint needs neither a configuration nor anything but plain values."""
    model, path = small(), tmp_path / "a.ckpt"
    train_classifier(model, batch_size=8).save_checkpoint(path)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
    loaded = MLPClassifier.load_from_checkpoint(path, weights_only=True)
    images = torch.randn(2, 1, 4, 4)
    assert torch.equal(loaded(images), model(images))


def test_labels_are_smoothed_in_training_alone():
    """The loss of validation stays comparable. Targets may be probabilities: accuracy is that of the likelier class."""
    images, targets = samples().tensors
    loss, model = nn.functional.cross_entropy, small(label_smoothing=0.3)
    shares = 0.7 * nn.functional.one_hot(targets, 3) + 0.1
    scores = model(images)
    found = train_classifier(model, data=TensorDataset(images, shares)).callback_metrics
    assert found["train/loss"].item() == pytest.approx(loss(scores, shares, label_smoothing=0.3).item(), rel=1e-5)
    assert found["train/acc"].item() == pytest.approx((scores.argmax(dim=1) == targets).float().mean().item())
    assert found["val/loss"].item() == pytest.approx(loss(model(images), targets).item(), rel=1e-5)


@pytest.mark.parametrize("mode", ["loader", "step", "lightning"])
def test_a_row_has_the_means_of_its_window(mode):
    """Those of the uncut batch, also where micro-batches are unequal; with Lightning's accumulation alone, too."""
    curves = []
    for cut in (False, True):
        callbacks, settings, batch_size = [], {}, 8
        if cut and mode == "lightning":
            batch_size, settings = 2, {"accumulate_grad_batches": 4}
        elif cut:
            callbacks = [AutoAccumulate(micro_batch_size=3, micro_batching=mode, verify=False)]
        logger, loader = Curves(), DataLoader(samples(), batch_size)
        trainer = quiet_trainer(*callbacks, logger=logger, log_every_n_steps=1, **settings)
        trainer.fit(small(), loader, loader)
        assert len(logger.rows) == 6
        curves.append([value for row in logger.rows for value in (row["train/loss"], row["train/acc"])])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_a_patch_has_its_row_by_its_look_and_its_place():
    """Equal pictures have equal rows; a pixel that changes, changes the patches that it lies in."""
    hashed = HashedPatches(200_000)
    picture, other = torch.zeros(2, 1, 1, 9, 9)
    other[0, 0, 0, 0] = 1
    rows, others = hashed(picture), hashed(other)
    assert hashed(picture).equal(rows)
    assert (rows != others).flatten().tolist() == [True] + [False] * 15
    assert len(set(rows.flatten().tolist())) == 16


def test_the_gradient_holds_the_touched_rows_alone():
    """And its values are those of a dense one."""
    images, targets = torch.rand(4, 1, 28, 28), torch.arange(4)
    gradients = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = HashedPatchClassifier(5000, 8, sparse=sparse)
        nn.functional.cross_entropy(model(images), targets).backward()
        gradients.append(model.net[1].weight.grad)
    assert gradients[0].is_sparse
    rows = HashedPatches(5000)(images).unique()
    assert gradients[0].coalesce().indices().flatten().equal(rows)
    torch.testing.assert_close(gradients[0].to_dense(), gradients[1])
