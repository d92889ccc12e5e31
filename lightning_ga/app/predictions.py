"""Predictions as a table: the sample or its file, the predicted class by number and name, and probabilities."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_COLUMNS = 100  # classes whose probabilities get a column each


def save_predictions(path: Path, batches: Sequence[Tensor], data: Any) -> None:
    """Write one row for each sample, from probabilities ``(batch, classes)`` or classes ``(batch,)``."""
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
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values()))


def rounded(column: Tensor) -> list[str]:
    """Probabilities with six digits behind the point."""
    return [f"{value:.6f}" for value in column.tolist()]
