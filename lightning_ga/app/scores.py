"""What a test and a prediction leave: scores of every class, and a table of what was predicted."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import classification_report
from torch import Tensor

from lightning_ga.app.run_files import write_table

MOST_COLUMNS = 100  # classes whose probabilities get a column each


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


def save_predictions(path: Path, batches: Sequence[Tensor], data: Any) -> None:
    """Write one row for each sample, from probabilities ``(batch, classes)`` or classes ``(batch,)``.

    A row has the sample or its file, the predicted class by number and name, and probabilities.
    """
    predicted = torch.cat(list(batches)).float()
    classes = predicted.argmax(dim=1) if predicted.dim() == 2 else predicted.long()
    names = list(getattr(data, "class_names", ()))
    table: dict[str, list[Any]] = {"sample": list(range(len(classes)))}
    files = getattr(getattr(getattr(data, "splits", None), "test", None), "images", None)
    if files is not None and not isinstance(files, Tensor):
        table["file"] = list(files)
    table["prediction"] = classes.tolist()
    if names:
        table["class"] = [names[label] for label in classes.tolist()]
    if predicted.dim() == 2:
        table["probability"] = rounded(predicted.gather(1, classes.unsqueeze(1)).squeeze(1))
        if predicted.shape[1] <= MOST_COLUMNS:
            labels = names or [str(label) for label in range(predicted.shape[1])]
            table |= {f"p({label})": rounded(column) for label, column in zip(labels, predicted.T)}
    write_table(path, [list(table), *zip(*table.values())])


def rounded(column: Tensor) -> list[str]:
    """Probabilities with six digits behind the point."""
    return [f"{value:.6f}" for value in column.tolist()]
