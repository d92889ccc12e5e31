"""Samples for the page of a run: the first batch of training, the worst of the test, the first of a prediction."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from lightning_ga.app.run_files import PICTURES, write_json
from lightning_ga.app.terminal import number

MOST = 24  # samples of a chapter
MOST_VALUES, MOST_SIGNS = 4, 120  # of a prediction
PIXELS, LEAST_PIXELS = 96, 4  # height and width of a picture on the page at most, and of a picture at all
TRAINING, TEST, PREDICTION = "Training batch, as the model sees it", "Test samples, worst first", "First predictions"
PROBABILITIES = "class_probabilities"  # key of what a step returns: ``(batch, classes)``


class Sample(NamedTuple):
    """A sample of a chapter."""

    rank: float  # in the chapter: lower ones come first
    picture: Tensor | None
    text: str


class Pictures(Callback):
    """Keeps samples of the first rank in ``pictures.json``.

    The worst samples of a test are those with the lowest probability of their class. It is known if ``test_step``
    returns a dict with ``class_probabilities``, and the batch has one whole number a sample as its label.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chapters: dict[str, list[Sample]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the first micro-batch, behind all transforms."""
        if TRAINING in self._chapters or not trainer.is_global_zero:
            return
        pictures = pictures_in(batch)
        labels, names = labels_in(batch, len(pictures)), class_names(trainer)
        self._chapters[TRAINING] = []
        for place, picture in enumerate(pictures[:MOST]):
            text = "" if labels is None else label_text(labels[place].cpu(), names)
            self._chapters[TRAINING].append(Sample(place, kept(picture), text))

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
        found = outputs.get(PROBABILITIES) if isinstance(outputs, Mapping) else None
        pictures = pictures_in(batch)
        labels, names = labels_in(batch, len(pictures)), class_names(trainer)
        if not isinstance(found, Tensor) or labels is None or labels.dim() > 1 or not trainer.is_global_zero:
            return
        probabilities, labels = found.float().cpu(), labels.cpu()
        if (
            len(probabilities) != len(labels)
            or not 0 <= int(labels.min()) <= int(labels.max()) < probabilities.shape[1]
        ):
            return
        of_label = probabilities.gather(1, labels[:, None]).flatten()
        samples = self._chapters.setdefault(TEST, [])
        for place in of_label.argsort()[:MOST].tolist():
            text, predicted = label_text(labels[place], names), class_text(probabilities[place], names)
            is_right = int(probabilities[place].argmax()) == int(labels[place])
            sentence = f"{text}: predicted {predicted}" if is_right else f"✗ {text}: predicted {predicted}"
            samples.append(Sample(float(of_label[place]), kept(pictures[place]), sentence))
        self._chapters[TEST] = sorted(samples, key=lambda sample: sample.rank)[:MOST]

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
        if PREDICTION in self._chapters or not trainer.is_global_zero:
            return
        pictures, texts = pictures_in(batch)[:MOST], prediction_texts(outputs, class_names(trainer))
        shown = map(kept, pictures) if len(pictures) == len(texts) else [None] * len(texts)
        self._chapters[PREDICTION] = [Sample(0, picture, text) for picture, text in zip(shown, texts)]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write what was kept."""
        chapters = {
            name: [["" if one.picture is None else as_png(one.picture), one.text] for one in samples]
            for name, samples in self._chapters.items()
            if samples
        }
        if chapters:
            write_json(self.folder / PICTURES, chapters)


def parts_of(batch: Any) -> Sequence[Any]:
    """The entries of a container."""
    if isinstance(batch, Mapping):
        return [*batch.values()]
    return batch if isinstance(batch, list | tuple) else []


def pictures_in(batch: Any) -> Sequence[Tensor]:
    """The pictures of a batch, each ``(1 or 3, height, width)``: its first tensor or list that holds nothing else."""
    parts = parts_of(batch)
    candidates = batch.unbind() if isinstance(batch, Tensor) and batch.dim() == 4 else parts
    if candidates and all(map(is_picture, candidates)):
        return candidates
    found = map(pictures_in, parts)
    return next((pictures for pictures in found if pictures), [])


def is_picture(value: Any) -> bool:
    """Whether a value has the shape of one picture."""
    is_shaped = isinstance(value, Tensor) and value.dim() == 3 and value.shape[0] in (1, 3)
    return is_shaped and min(value.shape[1:]) >= LEAST_PIXELS


def labels_in(batch: Any, samples: int) -> Tensor | None:
    """The labels of a batch: one whole number a sample, or one row of probabilities ``(batch, classes)``."""
    for part in parts_of(batch):
        if isinstance(part, Tensor) and samples and part.shape[:1] == (samples,):
            if part.dim() == 1 and not part.is_floating_point() and not part.is_complex():
                return part.long()
            if part.dim() == 2 and part.is_floating_point() and bool((part.sum(dim=1) - 1).abs().max() < 1e-3):
                return part
    return None


def class_names(trainer: Trainer) -> Sequence[str]:
    """The names that the data give their classes."""
    return getattr(trainer.datamodule, "class_names", ())  # type: ignore[attr-defined]


def name_of(label: int, names: Sequence[str]) -> str:
    """A class in words."""
    return str(names[label]) if 0 <= label < len(names) else str(label)


def label_text(label: Tensor, names: Sequence[str]) -> str:
    """A label in words; one that is mixed of several classes by their shares."""
    if not label.dim() or float(label.max()) > 0.995:
        return name_of(int(label.argmax()) if label.dim() else int(label), names)
    shares = label.float().sort(descending=True)
    pairs = zip(shares.values.tolist(), shares.indices.tolist())
    return " + ".join(f"{share:.0%} {name_of(index, names)}" for share, index in pairs if share > 0.005)


def class_text(probabilities: Tensor, names: Sequence[str]) -> str:
    """The most probable class and its probability."""
    return f"{name_of(int(probabilities.argmax()), names)} ({float(probabilities.max()):.0%})"


def prediction_texts(outputs: Any, names: Sequence[str]) -> list[str]:
    """What a prediction step has returned for the first samples, in words."""
    entries = outputs if isinstance(outputs, Mapping) else {"": outputs}
    tensors = {str(name): one for name, one in entries.items() if isinstance(one, Tensor) and one.dim()}
    if len(tensors) != len(entries) or len({len(one) for one in tensors.values()}) != 1:
        samples = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [shorten(str(one), MOST_SIGNS, placeholder=" …") for one in samples[:MOST]]
    texts = []
    for place in range(min(MOST, *map(len, tensors.values()), MOST)):
        words = []
        for name, tensor in tensors.items():
            row = tensor[place].cpu()
            if name == PROBABILITIES and row.dim() == 1:
                words.append(class_text(row.float(), names))
            else:
                values = row.flatten()[:MOST_VALUES].tolist()
                text = ", ".join(number(one) if isinstance(one, float) else str(one) for one in values)
                more = ", …" * (row.numel() > MOST_VALUES)
                words.append(f"{name}: {text}{more}" if name else f"{text}{more}")
        texts.append("; ".join(words))
    return texts


def kept(picture: Tensor) -> Tensor:
    """A copy on the host, which keeps nothing else of its batch."""
    return picture.detach().cpu().clone()


def as_png(picture: Tensor) -> str:
    """A PNG in base64, small, with the darkest value of the picture as black and the brightest as white."""
    pixels = picture.float().nan_to_num()
    low, high = pixels.aminmax()
    image = to_pil_image((pixels - low) / (high - low).clamp(min=1e-12))
    image.thumbnail((PIXELS, PIXELS))
    file = BytesIO()
    image.save(file, "png")
    return b64encode(file.getvalue()).decode()
