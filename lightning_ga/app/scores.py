"""Precision, recall and F1 of every class, from counts of predictions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_ga.app.report import write_json


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Scores of one class, or of an average over classes.

    Attributes:
        name: The class or the kind of average.
        precision: Share of the predictions of this class that are right.
        recall: Share of the samples of this class that were found.
        f1: Harmonic mean of both.
        support: Samples of this class in the test set.
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int


def class_scores(confusion: Sequence[Sequence[int]], names: Sequence[str] = ()) -> list[ClassScore]:
    """Scores of every class, then their macro average (plain) and weighted average (by support).

    A ratio without a denominator (a class that was never predicted, or has no samples) counts as 0.

    Args:
        confusion: Counts of samples, ``confusion[target][prediction]``.
        names: A name for each class; their numbers where there are none.

    Examples:
        >>> class_scores([[2, 0], [1, 1]], ["cat", "dog"])[1]
        ClassScore(name='dog', precision=1.0, recall=0.5, f1=0.6666666666666666, support=2)
    """
    names = names if len(names) == len(confusion) else [str(label) for label in range(len(confusion))]
    predicted = [sum(column) for column in zip(*confusion)]
    scores = []
    for label, (name, row) in enumerate(zip(names, confusion)):
        precision, recall = ratio(row[label], predicted[label]), ratio(row[label], sum(row))
        f1 = ratio(2 * row[label], predicted[label] + sum(row))
        scores.append(ClassScore(name, precision, recall, f1, sum(row)))
    return [*scores, average("macro average", scores, [1] * len(scores)), weighted_average(scores)]


def weighted_average(scores: Sequence[ClassScore]) -> ClassScore:
    """The average in which each class counts by its samples."""
    return average("weighted average", scores, [score.support for score in scores])


def average(name: str, scores: Sequence[ClassScore], weights: Sequence[int]) -> ClassScore:
    """A weighted mean of each score."""
    total = sum(weights)
    precision, recall, f1 = (
        ratio(sum(weight * getattr(score, field) for score, weight in zip(scores, weights)), total)
        for field in ("precision", "recall", "f1")
    )
    return ClassScore(name, precision, recall, f1, sum(score.support for score in scores))


def ratio(part: float, whole: float) -> float:
    """A quotient, or 0 where there is nothing to divide by."""
    return part / whole if whole else 0.0


def scores_text(scores: Sequence[ClassScore]) -> str:
    """The scores as aligned plain text."""
    width = max(len(score.name) for score in scores)
    lines = [f"{'':{width}}  precision  recall      f1  support"]
    for score in scores:
        values = f"{score.precision:9.4f}  {score.recall:6.4f}  {score.f1:6.4f}  {score.support:7d}"
        lines.append(f"{score.name:{width}}  {values}")
    lines.insert(-2, "")
    return "\n".join(lines)


def save_scores(folder: Path, scores: Sequence[ClassScore]) -> None:
    """``classification_report.txt`` and ``classification_report.json`` in a folder."""
    write_json(folder / "classification_report.json", [asdict(score) for score in scores])
    (folder / "classification_report.txt").write_text(scores_text(scores) + "\n", encoding="utf-8")
