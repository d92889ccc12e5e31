"""What a run leaves to read: the plan's table and JSON, the loss curves, precision and recall per class.

Everything here is made from frozen records, plain counts or the CSV log; nothing reads a Trainer.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_ga.exactness import Exactness
from lightning_ga.plan import AccumulationPlan
from lightning_ga.search import ProbeResult

Curve = list[tuple[int, float]]


def plan_table(
    plan: AccumulationPlan | None,
    probe: ProbeResult | None = None,
    exactness: Exactness | None = None,
    *,
    setting: str = "",
) -> Table:
    """The plan before the first step, in at most 80 columns.

    Args:
        plan: How a window is cut; nothing where no effective batch is known.
        probe: What the probe found, if one ran.
        exactness: What the exactness check measured, if it ran.
        setting: One line on what is trained.
    """
    table = Table(title="Plan", title_justify="left", title_style="bold", show_header=False, box=SIMPLE_HEAD, width=80)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    if setting:
        table.add_row("training", setting)
    for name, value in plan_rows(plan, probe, exactness):
        table.add_row(name, value)
    return table


def plan_rows(
    plan: AccumulationPlan | None, probe: ProbeResult | None, exactness: Exactness | None = None
) -> list[tuple[str, str]]:
    """The rows of the plan's table, as pairs of a name and a text."""
    rows = []
    if plan is not None:
        rows.append(("effective batch", describe_window(plan)))
    if probe is not None:
        peak, budget = format_bytes(probe.peak_bytes), format_bytes(probe.budget_bytes)
        rows.append(("memory", f"peak {peak} at the limit, of a budget of {budget}"))
        rows.append(("limit", f"{probe.limit} samples per micro-batch"))
        trials = f"{len(probe.trials)} trial{'s' * (len(probe.trials) != 1)}, {probe.steps} steps"
        rows.append(("probe", f"{trials}, {probe.seconds:.1f} s ({probe.method})"))
    if exactness is not None:
        whole = plan is not None and plan.factor == 1
        rows.append(("exactness", "whole windows: nothing is accumulated" if whole else str(exactness)))
    return rows or [("effective batch", "set by the loader")]


def describe_window(plan: AccumulationPlan) -> str:
    """An effective batch as chunks × factor × ranks.

    Examples:
        >>> from lightning_ga.plan import plan_accumulation
        >>> describe_window(plan_accumulation(32, micro_batch=8))
        '32 = 8 × 4 × 1 (micro-batch × factor × ranks)'
        >>> describe_window(plan_accumulation(256, micro_batch=48, world_size=2))
        '256 = (43 + 43 + 42) × 2 ranks, factor 3'
        >>> describe_window(plan_accumulation(5, micro_batch=2, world_size=2))
        '5 = (2 + 1) + (1 + 1), factor 2'
    """
    effective, sizes = plan.effective_batch_size, {size for rank in plan.chunks for size in rank}
    if len(sizes) == 1:
        return f"{effective} = {sizes.pop()} × {plan.factor} × {plan.world_size} (micro-batch × factor × ranks)"
    shares = Counter(f"({describe_chunks(rank)})" for rank in plan.chunks)
    if len(shares) == 1 and plan.world_size == 1:
        return f"{effective} = {describe_chunks(plan.chunks[0])}, factor {plan.factor}"
    parts = [share if ranks == 1 else f"{share} × {ranks} ranks" for share, ranks in shares.items()]
    return f"{effective} = {' + '.join(parts)}, factor {plan.factor}"


def describe_chunks(chunks: Sequence[int]) -> str:
    """Chunks one by one, or counted when there are many.

    Examples:
        >>> describe_chunks((4, 3)), describe_chunks((4, 4, 4, 3, 3, 3, 3))
        ('4 + 3', '3 × 4 + 4 × 3')
    """
    if len(chunks) <= 4:
        return " + ".join(map(str, chunks))
    return " + ".join(f"{count} × {size}" for size, count in Counter(chunks).items())


def format_bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point.

    Examples:
        >>> format_bytes(512), format_bytes(3 * 2**29)
        ('512 B', '1.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def save_plan(
    path: Path, plan: AccumulationPlan | None, probe: ProbeResult | None, exactness: Exactness | None = None
) -> None:
    """The records as JSON, ``null`` for one that is not there."""
    records = {"plan": plan, "probe": probe, "exactness": exactness}
    write_json(path, {name: asdict(record) if record else None for name, record in records.items()})


def write_json(path: Path, content: Any) -> None:
    """Indented JSON; the folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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


def read_curves(path: Path) -> dict[str, Curve]:
    """Every logged value of a ``metrics.csv`` by optimizer step: name to ``[(step, value), …]``."""
    curves: dict[str, Curve] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves


def plot_losses(path: Path, curves: Mapping[str, Curve]) -> bool:
    """Training and validation loss by optimizer step, as a PNG; nothing without either.

    Returns:
        Whether there was anything to draw.
    """
    train, validation = curves.get("train/loss", []), curves.get("val/loss", [])
    if not train and not validation:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train), color="C0", linewidth=1, alpha=0.35, label="training, each window")
        axes.plot(*zip(*running_mean(train)), color="C0", linewidth=2, label="training, running mean")
    if validation:
        axes.plot(*zip(*validation), color="C1", linewidth=2, marker="o", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss", title="Loss")
    finite = [value for curve in (train, validation) for _, value in curve if math.isfinite(value)]
    axes.set_ylim(bottom=0, top=1.05 * (max(finite, default=0.0) or 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return True


def running_mean(curve: Curve, decay: float = 0.8) -> Curve:
    """Exponential mean of a curve, without the bias towards its start.

    Examples:
        >>> running_mean([(0, 2.0), (5, 2.0)])
        [(0, 2.0), (5, 2.0)]
    """
    smooth, total, weight = [], 0.0, 0.0
    for step, value in curve:
        total, weight = decay * total + value, decay * weight + 1
        smooth.append((step, total / weight))
    return smooth
