import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lightning_ga import UserError
from lightning_ga.app.errors import explain
from lightning_ga.data import ImageFolder
from lightning_ga.data.images import ImageDataset, Labelled, open_picture


def write_classes(root: Path, part: str = "train", classes: tuple[str, ...] = ("cat", "dog"), count: int = 6) -> None:
    for label, name in enumerate(classes):
        folder = root / part / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            size = (40, 30)
            pixels = torch.randint(256, (30, 40, 3), generator=torch.Generator().manual_seed(index + 10 * label))
            Image.frombytes("RGB", size, pixels.to(torch.uint8).numpy().tobytes()).save(
                folder / f"{index}.{'jpg' if index % 2 else 'png'}"
            )


def break_pictures(folder: Path) -> dict[str, str]:
    """One file of each kind that cannot be read, with a word of the reason."""
    jpeg, png = (folder / "1.jpg").read_bytes(), (folder / "0.png").read_bytes()
    (folder / "a.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (folder / "b.png").write_bytes(png[: len(png) // 2])
    (folder / "c.png").write_bytes(b"")
    (folder / "d.png").write_bytes(b"no picture at all")
    (folder / "e.png").symlink_to("nowhere.png")
    return {"a.jpg": "truncated", "b.png": "", "c.png": "empty", "d.png": "no picture", "e.png": "a link to nothing"}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda root: write_classes(root, classes=("cat",)), "holds one class, cat"),
        (
            lambda root: (write_classes(root), write_classes(root, classes=("bird",), count=1)),
            r"each of the 3 classes in both parts: class bird has a single sample left",
        ),
        (lambda root: (write_classes(root), (root / "train" / "emu").mkdir()), "classes without a picture: emu"),
        (
            lambda root: (write_classes(root), write_classes(root, "val", ("cat", "dog", "emu"))),
            r"val' has classes that are not in train/: emu",
        ),
    ],
    ids=["one class", "one picture", "no picture", "only in validation"],
)
def test_classes_that_nothing_can_be_trained_with_are_named(tmp_path, make, told):
    make(tmp_path)
    with pytest.raises(UserError, match=told):
        ImageFolder(root=str(tmp_path)).setup("fit")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_breaks_training_is_named(tmp_path, workers):
    """Unchecked ones come to light when they are read; in a process of the loader, too."""
    write_classes(tmp_path)
    (tmp_path / "train" / "cat" / "a.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes()[:400])
    data = ImageFolder(root=str(tmp_path), check_pictures=False, num_workers=workers)
    data.setup("fit")
    with pytest.raises(UserError, match=r"a\.png.* cannot be read .*data\.skip_broken=true") as told:
        list(DataLoader(ImageDataset(data.splits.train, data.transform()), batch_size=4, num_workers=workers))
    assert explain(told.value).startswith("'")


def test_every_picture_that_cannot_be_read_is_listed_before_training(tmp_path):
    """Truncated, empty, no picture, a link to nothing: each with the reason, all in one error."""
    write_classes(tmp_path)
    broken = break_pictures(tmp_path / "train" / "dog")
    with pytest.raises(UserError, match=r"^5 pictures cannot be read: ") as told:
        ImageFolder(root=str(tmp_path)).setup("fit")
    for name, reason in broken.items():
        assert f"{name} (" in str(told.value)
        assert reason in str(told.value)
    assert "data.skip_broken=true" in str(told.value)


def test_pictures_that_cannot_be_read_are_left_out_on_demand(tmp_path, capsys):
    write_classes(tmp_path)
    break_pictures(tmp_path / "train" / "dog")
    data = ImageFolder(root=str(tmp_path), skip_broken=True, val_fraction=0.25, test_fraction=0.25)
    data.setup("fit")
    assert sum(len(part.labels) for part in data.splits) == 12
    assert "Warning: 5 of 17 pictures cannot be read and are left out" in capsys.readouterr().err


def test_what_systems_leave_in_folders_is_no_class(tmp_path, capsys):
    """Hidden folders and those of macOS archives are left out, with a word."""
    write_classes(tmp_path)
    for name in ("__MACOSX", ".thumbs"):
        (tmp_path / "train" / name / "x").mkdir(parents=True)
    write_classes(tmp_path, classes=("cat/.thumbs",), count=1)
    data = ImageFolder(root=str(tmp_path), val_fraction=0.25, test_fraction=0.25)
    assert (data.num_classes, data.class_names) == (2, ["cat", "dog"])
    assert "left out, are .thumbs, __MACOSX in" in capsys.readouterr().err
    data.setup("fit")
    assert sum(len(part.labels) for part in data.splits) == 12


def test_a_picture_starts_no_program(tmp_path, monkeypatch):
    """Pillow knows a file by its content: PostScript that is called .png would be given to ``gs``."""
    write_classes(tmp_path)
    started = tmp_path / "started"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    eps = tmp_path / "train" / "cat" / "x.png"
    eps.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UserError, match=r"x\.png \(no picture\)"):
        ImageFolder(root=str(tmp_path)).setup("fit")
    data = ImageFolder(root=str(tmp_path), check_pictures=False)
    with pytest.raises(UserError, match="is no picture"):
        ImageDataset(Labelled([str(eps)], torch.zeros(1)), data.transform())[0]
    assert not started.exists()


def test_a_pipe_among_pictures_is_not_waited_for(tmp_path):
    """It would hang for ever, in the check or in training."""
    write_classes(tmp_path)
    pipe = tmp_path / "train" / "dog" / "z.png"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"z\.png \(no regular file\)"):
        ImageFolder(root=str(tmp_path)).setup("fit")
    with pytest.raises(UserError, match="no regular file"):
        open_picture(str(pipe))
