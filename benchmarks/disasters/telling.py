"""Tell stories: every life is a fork of this process, which trains nothing itself; then judge how they ended."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.disasters.stories import SAMPLES, Story
from benchmarks.disasters.victims import live
from benchmarks.processes import forked

HANGS_AFTER = 180.0  # seconds of a life
WORST = 1e-5  # relative difference of final weights


@dataclass(frozen=True, slots=True)
class Told:
    """How a story went."""

    story: Story
    faults: Counter[str]
    kills: Counter[str]
    difference: float
    broken: tuple[str, ...]


def tell(story: Story, folder: Path, undisturbed: Path | None = None) -> Told:
    """Let it happen, and compare with the run that nothing happened to."""
    folder.mkdir(parents=True)
    for number in range(len(story.lives)):
        output = folder / f"life{number}.txt"
        ended, _ = forked(partial(live, story, number, folder), output, hangs_after=HANGS_AFTER)
        if ended == 0:
            break
        if not any(line["kind"] == "kill" for line in diary(folder, story.ranks, number)):
            said = output.read_text().strip().splitlines()
            how = "hung" if ended is None else f"ended with {ended}: {said[-1] if said else ''}"
            return told(story, folder, float("nan"), [f"life {number} {how}"])
    return judged(story, folder, undisturbed or folder)


def diary(folder: Path, ranks: int, life: int | None = None) -> list[dict[str, Any]]:
    """What all ranks wrote down, in one life or in all."""
    files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    lines = [json.loads(line) for file in files if file.is_file() for line in file.read_text().splitlines()]
    return [line for line in lines if life in (None, line["life"])]


def that_count(lines: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The lines of each optimizer step that final weights come from: where it was run again, of the last life.

    Examples:
        >>> lines = [{"kind": "step", "step": 1, "life": life} for life in (0, 1, 1)]
        >>> that_count(lines)[1] == lines[1:]
        True
    """
    steps = [line for line in lines if line["kind"] == "step"]
    latest = {line["step"]: line["life"] for line in sorted(steps, key=itemgetter("step", "life"))}
    return {step: [x for x in steps if (x["step"], x["life"]) == (step, life)] for step, life in latest.items()}


def judged(story: Story, folder: Path, undisturbed: Path) -> Told:
    """Compare a story that has ended with the undisturbed run."""
    ours, theirs = torch.load(folder / "end0.pt"), torch.load(undisturbed / "end0.pt")
    difference = float((ours["weights"] - theirs["weights"]).norm() / theirs["weights"].norm())
    broken = []
    if not difference <= WORST:
        broken.append(f"weights differ by {difference:.1e}")
    if ours["loss"] is not None and not abs(ours["loss"] - theirs["loss"]) <= WORST * abs(theirs["loss"]):
        broken.append(f"validation loss {ours['loss']} instead of {theirs['loss']}")
    if ours["steps"] != theirs["steps"]:
        broken.append(f"{ours['steps']} optimizer steps instead of {theirs['steps']}")
    steps, expected = that_count(diary(folder, story.ranks)), that_count(diary(undisturbed, 1))
    if [lines[0]["rate"] for lines in steps.values()] != [lines[0]["rate"] for lines in expected.values()]:
        broken.append("other learning rates")
    return told(story, folder, difference, [*broken, *samples_missed(steps)])


def samples_missed(steps: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Epochs in which not every sample was used exactly once.

    Examples:
        >>> samples_missed({1: [{"epoch": 0, "used": [*range(200)]}], 2: [{"epoch": 1, "used": [0, 0]}]})
        ['epoch 1: 199 samples missing, 1 more than once']
    """
    used: dict[int, Counter[int]] = {}
    for line in chain.from_iterable(steps.values()):
        used.setdefault(line["epoch"], Counter()).update(line["used"])
    return [
        f"epoch {epoch}: {SAMPLES - len(counts)} samples missing, {again} more than once"
        for epoch, counts in used.items()
        if (again := sum(count > 1 for count in counts.values())) or len(counts) != SAMPLES
    ]


def told(story: Story, folder: Path, difference: float, broken: Sequence[str]) -> Told:
    """What happened, and what is wrong with it."""
    lines = diary(folder, story.ranks)
    kinds = {kind: Counter(str(line["place"]) for line in lines if line["kind"] == kind) for kind in ("fault", "kill")}
    return Told(story, kinds["fault"], kinds["kill"], difference, tuple(broken))
