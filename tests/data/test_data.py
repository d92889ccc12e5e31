import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_ga import UserError
from lightning_ga.data import CIFAR10, MNIST, Digits, FashionMNIST, ImageFolder, QuarterTurn, Synthetic
from lightning_ga.data.images import ImageData
from lightning_ga.data.sets import DEBIAN_FOLDER, FILES


def ready(data: ImageData) -> ImageData:
    data.prepare_data()
    data.setup("fit")
    return data


def sizes(data: ImageData) -> list[int]:
    return [len(part.labels) for part in data.splits]


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, ending: str = "") -> None:
    """40 + 20 pictures in the format of MNIST; each pixel is the label times ten."""
    for train, count in ((True, 40), (False, 20)):
        images, labels = FILES[:2] if train else FILES[2:]
        targets = np.arange(count) % 10
        write_idx(folder / f"{labels}{ending}", targets)
        write_idx(folder / f"{images}{ending}", np.broadcast_to(targets[:, None, None] * 10, (count, 28, 28)))


def test_digits_are_split_in_the_same_mix_of_classes():
    """All 1,797, each in one part, and the same parts every time."""
    data, again = ready(Digits()), ready(Digits())
    assert sum(sizes(data)) == 1797
    for part, same in zip(data.splits, again.splits):
        shares = torch.bincount(part.labels) / len(part.labels)
        assert shares.min() > 0.08
        assert shares.max() < 0.12
        assert torch.equal(part.images, same.images)


def test_images_come_in_the_size_and_channels_that_were_asked_for():
    """Grey digits as colour images of another size, normalized."""
    images, labels = next(
        iter(ready(Digits(image_size=20, channels=3, batch_size=4, mean=0.3, std=0.4)).train_dataloader())
    )
    assert images.shape == (4, 3, 20, 20)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert torch.equal(images[:, 0], images[:, 2])


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0), (1, 1)])
def test_training_batches_are_mixed(mixup: float, cutmix: float):
    """Targets become shares of two classes, in the mix of the images; other batches stay as they are."""
    torch.manual_seed(0)
    data = ready(Digits(batch_size=64, mixup=mixup, cutmix=cutmix))
    images, targets = next(iter(data.train_dataloader()))
    assert images.shape == (64, 1, 32, 32)
    assert targets.shape == (64, 10)
    assert torch.allclose(targets.sum(dim=1), torch.ones(64))
    assert ((targets > 0).sum(dim=1) == 2).sum() > 0
    assert next(iter(data.val_dataloader()))[1].dtype == torch.int64


@pytest.mark.parametrize(("magnitude", "changed"), [(None, 0), (9, 1)])
def test_rand_augment_changes_training_images_alone(magnitude, changed):
    torch.manual_seed(0)
    data, plain = ready(Digits(rand_augment=magnitude)), ready(Digits())
    for part, differs in (("train", changed), ("val", 0)):
        sets = [getattr(each, f"{part}_dataloader")().dataset for each in (data, plain)]
        assert any(not torch.equal(sets[0][i][0], sets[1][i][0]) for i in range(10)) == bool(differs)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("below", [".", "MNIST/raw"])
def test_mnist_is_read_from_idx_files(tmp_path, below, ending):
    write_mnist(tmp_path / below, ending)
    data = ready(MNIST(root=str(tmp_path), val_fraction=0.25))
    assert sizes(data) == [30, 10, 20]
    assert torch.equal(data.splits.train.images[:, 0, 0, 0].long(), data.splits.train.labels * 10)


def test_fashion_mnist_is_found_in_debians_unpacked_package(tmp_path):
    write_mnist(tmp_path / DEBIAN_FOLDER, ".gz")
    data = ready(FashionMNIST(root=str(tmp_path), val_fraction=0.25))
    assert sizes(data) == [30, 10, 20]
    assert data.class_names[9] == "Ankle boot"


@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
def test_a_missing_set_tells_how_to_get_it(tmp_path, kind):
    """Nothing is fetched unasked."""
    with pytest.raises(
        UserError, match=f"data={kind.name} is not, or not whole, in data.root=.* add data.download=true"
    ):
        ready(kind(root=str(tmp_path)))


def test_a_download_that_fails_says_why(tmp_path, monkeypatch):
    """The network's own words, and the folder to copy files into."""

    def fail(*_args, **_arguments):
        raise OSError("Name or service not known")

    monkeypatch.setattr(MNIST, "source", fail)
    monkeypatch.setattr(fail, "__name__", "MNIST")
    with pytest.raises(UserError, match=r"could not be downloaded \(Name or service not known\)"):
        ready(MNIST(root=str(tmp_path), download=True))


def test_cifar10_is_read_by_torchvision(tmp_path, monkeypatch):
    """The batches of the python version: rows of 3,072 bytes, red plane first."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name in names:
        rows = np.zeros((20, 3072), dtype=np.uint8)
        rows[:, :1024] = np.arange(20)[:, None] % 10
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [i % 10 for i in range(20)]}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(CIFAR10.class_names)}, protocol=2))
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = ready(CIFAR10(root=str(tmp_path), channels=3, val_fraction=0.2))
    assert sizes(data) == [80, 20, 20]
    train = data.splits.train
    assert train.images.shape == (80, 3, 32, 32)
    assert torch.equal(train.images[:, 0, 5, 5].long(), train.labels)
    assert int(train.images[:, 1:].sum()) == 0


def write_pictures(folder: Path, count: int) -> None:
    for label, name in enumerate(["cat", "dog"]):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (9 + index, 7), (label * 255, 0, 0)).save(folder / name / f"{index:02}.png")


def test_an_image_folder_of_training_pictures_alone(tmp_path):
    """Validation and test are held out; classes are counted and named; other files are passed over."""
    write_pictures(tmp_path / "train", 20)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not a picture")
    data = ready(ImageFolder(root=str(tmp_path), image_size=8, channels=3, mean=0.0, std=1.0, batch_size=40))
    assert sizes(data) == [32, 4, 4]
    assert (data.num_classes, data.class_names) == (2, ["cat", "dog"])
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (32, 3, 8, 8)
    assert torch.equal(images[:, 0, 0, 0].long(), labels)


def test_synthetic_pictures_can_be_learned_and_repeat():
    """The nearest class mean finds the class; the same seed draws the same pictures."""
    data = ready(Synthetic(samples=200, image_size=8, num_classes=4))
    assert torch.equal(
        data.splits.train.images, ready(Synthetic(samples=200, image_size=8, num_classes=4)).splits.train.images
    )
    train, test = data.splits.train, data.splits.test
    means = torch.stack([train.images[train.labels == c].float().mean(0) for c in range(4)])
    nearest = torch.cdist(test.images.float().flatten(1), means.flatten(1)).argmin(1)
    assert torch.equal(nearest, test.labels)


def test_quarter_turns_are_all_four():
    """An image comes back in each of its four positions, never mirrored."""
    torch.manual_seed(0)
    image = torch.arange(4).reshape(1, 2, 2)
    seen = {tuple(QuarterTurn()(image).flatten().tolist()) for _ in range(50)}
    assert seen == {tuple(torch.rot90(image, k, (-2, -1)).flatten().tolist()) for k in range(4)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:4] + b"\0\0\0\5" + file.read_bytes()[8:13]), "other numbers"),
        (lambda file: file.write_bytes(b""), "no whole idx file"),
        (lambda file: file.write_bytes(b"hello world"), "no whole idx file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "download it again"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is not, or not whole, in data.root"),
    ],
)
def test_idx_files_that_do_not_fit_each_other_are_refused(tmp_path, change, words):
    """Fewer labels than pictures, a damaged file, and a pipe, which is not waited for."""
    write_mnist(tmp_path, "")
    change(tmp_path / FILES[1])
    with pytest.raises(UserError, match=words):
        ready(MNIST(root=str(tmp_path), val_fraction=0.25))


def test_more_generated_pictures_than_memory_holds_are_refused():
    """Before any is drawn."""
    with pytest.raises(UserError, match=r"data\.samples=1000000000000 take [\d,]+ bytes"):
        ready(Synthetic(samples=10**12))
