import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lightning_ga import UserError
from lightning_ga.data import ImageFolder
from lightning_ga.data.images import read_picture


def write_classes(root: Path, part: str = "train", classes: tuple[str, ...] = ("cat", "dog"), count: int = 6) -> None:
    """Pictures of 40×30 pixels, as PNG and JPEG in turn; the red of a class is its number times 100."""
    for label, name in enumerate(classes):
        (root / part / name).mkdir(parents=True)
        for index in range(count):
            picture = Image.new("RGB", (40, 30), (100 * label, 0, 0))
            picture.save(root / part / name / f"{index}.{'jpg' if index % 2 else 'png'}", quality=100)


def break_pictures(folder: Path) -> dict[str, str]:
    """One file of each kind that cannot be read, with a word of the reason."""
    (folder / "b.jpg").write_bytes((folder / "1.jpg").read_bytes()[:-20])
    (folder / "c.png").write_bytes(b"")
    (folder / "d.png").write_bytes(b"no picture at all")
    (folder / "e.png").symlink_to("nowhere.png")
    unknown = "cannot identify image file"
    return {"b.jpg": "truncated", "c.png": unknown, "d.png": unknown, "e.png": "No such file"}


def ready(root: Path, **arguments) -> ImageFolder:
    data = ImageFolder(root=str(root), channels=3, **arguments)
    data.setup("fit")
    return data


def test_an_image_folder_of_training_pictures_alone(tmp_path):
    """Validation and test are held out; classes are counted and named; other files are passed over."""
    write_classes(tmp_path, count=20)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not a picture")
    data = ready(tmp_path, image_size=8, mean=0.0, std=1 / 255, batch_size=40)
    assert [len(part.labels) for part in data.splits] == [32, 4, 4]
    assert (data.num_classes, data.class_names) == (2, ["cat", "dog"])
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (32, 3, 8, 8)
    torch.testing.assert_close(images[:, 0, 3, 3], 100.0 * labels, atol=2, rtol=0)


def test_a_validation_folder_may_lack_a_class(tmp_path):
    """Classes keep the numbers that they have in training."""
    write_classes(tmp_path, classes=("bird", "cat", "dog"))
    write_classes(tmp_path, "val", classes=("dog",), count=2)
    assert ready(tmp_path, test_fraction=0.5).splits.val.labels.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda root: None, r"set data\.root=FOLDER"),
        (lambda root: write_classes(root, classes=("a", "b", "c"), count=1), r"cannot be held out \(.*: add samples"),
        (
            lambda root: (write_classes(root), write_classes(root, "val", ("emu",))),
            r"val' has classes .* train/: emu\.",
        ),
    ],
    ids=["nothing", "one picture", "only in validation"],
)
def test_folders_that_nothing_can_be_trained_with(tmp_path, make, told):
    make(tmp_path)
    with pytest.raises(UserError, match=told):
        ready(tmp_path)


def test_pictures_that_cannot_be_read_are_listed_or_left_out(tmp_path, capsys):
    """Truncated, empty, no picture, a link to nothing: each with the reason, all in one error before training."""
    write_classes(tmp_path)
    broken = break_pictures(tmp_path / "train" / "dog")
    with pytest.raises(UserError, match=r"^4 of 16 pictures cannot be read: .*data\.skip_broken=true") as told:
        ready(tmp_path)
    listed = {each.split(" (")[0].rpartition("/")[2]: each for each in str(told.value).split("; ")}
    assert [name for name, reason in broken.items() if reason not in listed[name]] == []
    data = ready(tmp_path, skip_broken=True, val_fraction=0.25, test_fraction=0.25)
    assert sum(len(part.labels) for part in data.splits) == 12
    assert "Warning: 4 of 16 pictures cannot be read and are left out" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_breaks_training_is_named(tmp_path, workers):
    """Unchecked ones come to light when they are read; in a process of the loader, too."""
    write_classes(tmp_path)
    break_pictures(tmp_path / "train" / "dog")
    data = ready(tmp_path, check_pictures=False, num_workers=workers)
    with pytest.raises(UserError, match=r"/[b-e]\.\w+' cannot be read"):
        list(DataLoader(data.dataset("train"), batch_size=4, num_workers=workers))


def test_a_picture_starts_no_program(tmp_path, monkeypatch):
    """Pillow knows a file by its content: PostScript that is called .png would be given to ``gs``."""
    started, program, eps = (tmp_path / name for name in ("started", "gs", "x.png"))
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    eps.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UserError, match="cannot identify image file"):
        read_picture(str(eps))
    assert not started.exists()
