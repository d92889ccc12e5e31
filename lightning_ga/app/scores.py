"""Precision, recall and F1 of every class: scikit-learn's report, from counts of predictions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from sklearn.metrics import classification_report


def class_report(confusion: Sequence[Sequence[int]], names: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Scores of every class, their macro average (plain) and weighted average (by support), as text and as numbers.

    Samples are counted in ``confusion[target][prediction]``. Classes without names have numbers. A ratio without a
    denominator (a class that was never predicted, or has no samples) is 0.

    Examples:
        >>> class_report([[2, 0], [1, 1]], ["cat", "dog"])[1]["dog"]["recall"]
        0.5
    """
    counts = np.asarray(confusion)
    targets, predictions = (np.repeat(labels, counts.ravel()) for labels in np.indices(counts.shape).reshape(2, -1))
    report = partial(
        classification_report,
        targets,
        predictions,
        labels=range(len(counts)),
        target_names=names if len(names) == len(counts) else None,
        digits=4,
        zero_division=0,
    )
    return report(), report(output_dict=True)
