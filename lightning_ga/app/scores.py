"""Precision, recall and F1 of every class, computed by scikit-learn from counts of predictions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from sklearn.metrics import precision_recall_fscore_support

from lightning_ga.app.plan_table import write_json

AVERAGES = ("macro average", "weighted average")


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
    counts = np.asarray(confusion)
    labels = list(range(len(counts)))
    targets, predictions = np.indices(counts.shape).reshape(2, -1)
    names = names if len(names) == len(labels) else [str(label) for label in labels]

    def scores(average: str | None) -> np.ndarray:
        found = precision_recall_fscore_support(
            targets, predictions, labels=labels, average=average, sample_weight=counts.ravel(), zero_division=0
        )
        return np.array(found[:3], dtype=float).T.reshape(-1, 3)

    values = np.concatenate([scores(None), scores("macro"), scores("weighted")])
    supports = [*counts.sum(axis=1), counts.sum(), counts.sum()]
    return [
        ClassScore(name, float(precision), float(recall), float(f1), int(support))
        for name, (precision, recall, f1), support in zip([*names, *AVERAGES], values, supports)
    ]


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
