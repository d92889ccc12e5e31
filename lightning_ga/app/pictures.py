"""Samples for the page of a run: the first batch of training, the worst of the test, the first of a prediction."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from lightning_ga.app.run_files import PICTURES, write_json

MOST = 24  # samples of a chapter
MOST_SIGNS = 120  # of a prediction in words
PIXELS = 96  # height and width of a picture on the page at most
LEAST_PIXELS = 4  # of a picture
TRAINING = "Training batch, as the model sees it"
TEST = "Test samples, worst first"
PREDICTION = "First predictions"
PROBABILITIES = "class_probabilities"  # key of what a step returns: ``(batch, classes)``


Sample = tuple[str, str]  # a PNG in base64, empty if there is none, and a text


class Pictures(Callback):
    """Keeps samples of the first rank in ``pictures.json``.

    The worst samples of a test are those with the lowest probability of their class. It is known if ``test_step``
    returns a dict with ``class_probabilities``, and the batch has one whole number a sample as its label.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chapters: dict[str, Sequence[Sample]] = {}
        self._worst: list[tuple[float, Sample]] = []  # of a test, the probability of their class before each

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the first micro-batch, behind all transforms."""
        if TRAINING in self._chapters:
            return
        pictures = pictures_in(batch)
        labels = labels_in(batch, len(pictures))
        texts = [""] * len(pictures)
        if labels is not None:
            texts = [class_name(trainer, label) for label in labels.tolist()]
        self._chapters[TRAINING] = with_pictures(texts[:MOST], pictures)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the worst samples so far."""
        pictures = pictures_in(batch)
        rows = probabilities_in(outputs)
        labels = labels_in(batch, len(rows))
        if labels is None or len(pictures) != len(rows) or not 0 <= labels.min() <= labels.max() < rows.shape[1]:
            return
        of_label = rows.gather(1, labels[:, None]).flatten()
        for place in of_label.argsort()[:MOST].tolist():
            label = int(labels[place])
            text = f"{class_name(trainer, label)}: predicted {class_text(trainer, rows[place])}"
            if int(rows[place].argmax()) != label:
                text = f"✗ {text}"
            self._worst.append((float(of_label[place]), (as_png(pictures[place]), text)))
        self._worst = sorted(self._worst)[:MOST]
        self._chapters[TEST] = [*map(itemgetter(1), self._worst)]

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the first batch of predictions, in words, with its pictures if there are any."""
        if PREDICTION in self._chapters:
            return
        texts = [class_text(trainer, row) for row in probabilities_in(outputs)[:MOST]]
        self._chapters[PREDICTION] = with_pictures(texts or in_words(outputs), pictures_in(batch))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write what was kept."""
        chapters = dict(filter(itemgetter(1), self._chapters.items()))  # but for empty ones
        if chapters and trainer.is_global_zero:
            write_json(self.folder / PICTURES, chapters)


def with_pictures(texts: Sequence[str], pictures: Sequence[Tensor]) -> list[Sample]:
    """Samples with their pictures, if there is one for each text."""
    pngs = [""] * len(texts)
    if len(pictures[:MOST]) == len(texts):
        pngs = [*map(as_png, pictures[:MOST])]
    return [*zip(pngs, texts)]


def parts_of(batch: Any) -> Sequence[Any]:
    """The entries of a container."""
    if isinstance(batch, Mapping):
        return [*batch.values()]
    if isinstance(batch, list | tuple):
        return batch
    return []


def pictures_in(batch: Any) -> Sequence[Tensor]:
    """The pictures of a batch, each ``(1 or 3, height, width)``: its first tensor or list that holds nothing else."""
    parts = parts_of(batch)
    if isinstance(batch, Tensor) and batch.dim() == 4:
        parts = batch.unbind()
    if all(map(is_picture, parts)):
        return parts
    for part in parts:
        pictures = pictures_in(part)
        if pictures:
            return pictures
    return []


def is_picture(value: Any) -> bool:
    """Whether a value has the shape of one picture."""
    is_shaped = isinstance(value, Tensor) and value.dim() == 3 and value.shape[0] in (1, 3)
    return is_shaped and min(value.shape[1:]) >= LEAST_PIXELS


def labels_in(batch: Any, samples: int) -> Tensor | None:
    """The labels of a batch, one whole number a sample; targets that are mixed are none."""
    for part in parts_of(batch):
        if samples and isinstance(part, Tensor) and part.shape == (samples,) and not part.is_floating_point():
            return part.long().cpu()
    return None


def probabilities_in(outputs: Any) -> Tensor:
    """The probabilities that a step has returned, ``(batch, classes)``; none if there are none."""
    if isinstance(outputs, Mapping):
        probabilities = outputs.get(PROBABILITIES)
        if isinstance(probabilities, Tensor) and probabilities.dim() == 2:
            return probabilities.float().cpu()
    return Tensor()


def class_name(trainer: Trainer, label: int) -> str:
    """A class by the name that the data give it."""
    names = getattr(trainer.datamodule, "class_names", ())  # type: ignore[attr-defined]
    if 0 <= label < len(names):
        return str(names[label])
    return str(label)


def class_text(trainer: Trainer, probabilities: Tensor) -> str:
    """The most probable class and its probability."""
    return f"{class_name(trainer, int(probabilities.argmax()))} ({float(probabilities.max()):.0%})"


def in_words(outputs: Any) -> list[str]:
    """What a prediction step has returned for the first samples, if it returned a tensor or list of them."""
    samples: Sequence[Any] = [outputs]
    if isinstance(outputs, Tensor) and outputs.dim():
        samples = [*outputs.detach().cpu().float().numpy()]
    elif isinstance(outputs, list | tuple):
        samples = outputs
    return [shorten(str(one), MOST_SIGNS, placeholder=" …") for one in samples[:MOST]]


def as_png(picture: Tensor) -> str:
    """A PNG in base64, small, with the darkest value of the picture as black and the brightest as white."""
    pixels = picture.detach().float().nan_to_num().cpu()
    low, high = pixels.aminmax()
    image = to_pil_image((pixels - low) / (high - low).clamp(min=1e-12))
    image.thumbnail((PIXELS, PIXELS))
    file = BytesIO()
    image.save(file, "png")
    return b64encode(file.getvalue()).decode()
