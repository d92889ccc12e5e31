import gzip
import pickle
import struct
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_ga import UserError
from lightning_ga.data import CIFAR10, MNIST, Digits, FashionMNIST, QuarterTurn
from lightning_ga.data.images import ImageData
from lightning_ga.data.sets import DEBIAN_FOLDER


def ready(data: ImageData) -> ImageData:
    data.prepare_data()
    data.setup("fit")
    return data


def sizes(data: ImageData) -> list[int]:
    return [len(part.labels) for part in data.splits]


def write_mnist(folder: Path, ending: str = "") -> None:
    """40 + 20 pictures in the format of MNIST; each pixel is the label times ten."""
    folder.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 20)):
        targets = np.arange(count, dtype=np.uint8) % 10
        images = np.broadcast_to(targets[:, None, None] * 10, (count, 28, 28))
        for name, values in (("labels-idx1", targets), ("images-idx3", images)):
            content = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()
            path = folder / f"{part}-{name}-ubyte{ending}"
            path.write_bytes(gzip.compress(content) if ending else content)


def test_digits_are_split_in_the_same_mix_of_classes():
    """All 1,797, each in one part, and the same parts every time; in the size and channels that are asked for."""
    data, again = ready(Digits(image_size=20, channels=3, batch_size=4, mean=0.3, std=0.4)), ready(Digits())
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 20, 20), torch.float32, torch.int64)
    assert torch.equal(images[:, 0], images[:, 2])
    assert sum(sizes(data)) == 1797
    for part, same in zip(data.splits, again.splits):
        shares = torch.bincount(part.labels) / len(part.labels)
        assert 0.08 < shares.min() <= shares.max() < 0.12
        assert torch.equal(part.images, same.images)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (1, 1)])
def test_training_batches_are_mixed(mixup: float, cutmix: float):
    """Targets become shares of two classes, in the mix of the images; other batches stay as they are."""
    torch.manual_seed(0)
    data = ready(Digits(batch_size=64, mixup=mixup, cutmix=cutmix))
    images, targets = next(iter(data.train_dataloader()))
    assert (images.shape, targets.shape) == ((64, 1, 32, 32), (64, 10))
    assert torch.allclose(targets.sum(dim=1), torch.ones(64))
    assert ((targets > 0).sum(dim=1) == 2).sum() > 0
    assert next(iter(data.val_dataloader()))[1].dtype == torch.int64


def test_rand_augment_changes_training_images_alone():
    torch.manual_seed(0)
    data, plain = ready(Digits(rand_augment=9)), ready(Digits())
    for part in ("train", "val"):
        pairs = zip(data.dataset(part), plain.dataset(part))
        assert any(not torch.equal(one[0], other[0]) for one, other in islice(pairs, 10)) == (part == "train")


def test_mnist_is_read_by_torchvision(tmp_path):
    """Fashion-MNIST from Debian's unpacked package."""
    write_mnist(tmp_path / DEBIAN_FOLDER, ".gz")
    fashion = ready(FashionMNIST(root=str(tmp_path), val_fraction=0.25))
    assert (sizes(fashion), fashion.class_names[9]) == ([30, 10, 20], "Ankle boot")
    assert not (tmp_path / "FashionMNIST").exists()
    write_mnist(tmp_path / "MNIST" / "raw")
    data = ready(MNIST(root=str(tmp_path), val_fraction=0.25, download=True))
    assert sizes(data) == [30, 10, 20]
    assert data.splits.train.images.shape == (30, 1, 28, 28)
    assert torch.equal(data.splits.train.images[:, 0, 0, 0].long(), data.splits.train.labels * 10)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10])
def test_a_missing_set_tells_how_to_get_it(tmp_path, kind, monkeypatch):
    """Nothing is fetched unasked; a file that is cut off counts as missing."""
    monkeypatch.setattr("lightning_ga.data.sets.DEBIAN_FOLDER", "nowhere")
    write_mnist(tmp_path / "MNIST/raw")
    labels = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"data={kind.name} is not, or not whole, in data.root=.* add data.download=tr"):
        ready(kind(root=str(tmp_path)))


def test_fewer_classes_than_the_set_has_are_refused():
    with pytest.raises(UserError, match=r"data\.num_classes=5 must be at least 10, the classes of digits"):
        ready(Digits(num_classes=5))


def test_cifar10_is_read_by_torchvision(tmp_path, monkeypatch):
    """The batches of the python version: rows of 3,072 bytes, red plane first."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.zeros((20, 3072), dtype=np.uint8)
    rows[:, :1024] = np.arange(20)[:, None] % 10
    content = {"data": rows, "labels": [i % 10 for i in range(20)], "label_names": list(CIFAR10.class_names)}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = ready(CIFAR10(root=str(tmp_path), channels=3, val_fraction=0.2))
    assert sizes(data) == [80, 20, 20]
    train = data.splits.train
    assert train.images.shape == (80, 3, 32, 32)
    assert torch.equal(train.images[:, 0, 5, 5].long(), train.labels)
    assert int(train.images[:, 1:].sum()) == 0


def test_quarter_turns_are_all_four():
    """An image comes back in each of its four positions, never mirrored."""
    torch.manual_seed(0)
    image = torch.arange(4).reshape(1, 2, 2)
    positions = [torch.rot90(image, k, (-2, -1)).tolist() for k in range(4)]
    seen = [QuarterTurn()(image).tolist() for _ in range(50)]
    assert all(one in seen for one in positions)
    assert all(one in positions for one in seen)
