"""Does a run survive everything at once? ``python -m benchmarks.chaos --faults 300 --seed 0``.

Two small networks, three epochs each, again and again. Memory runs out at random operations on one of the ranks; the
process, or one rank of two, is killed at random moments and resumed with another micro-batch. Every run has to end with
the weights, the validation loss, the learning rates and the samples of a run that nothing happened to.
"""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.disasters import MODELS, MOMENTS, PLACES, SAMPLES, Story, draw, live, undisturbed
from benchmarks.output import Record, benchmark, error, shown
from benchmarks.processes import forked
from benchmarks.trainers import relative_error

COLUMNS = ("loader, 1 rank", "step, 1 rank", "loader, 2 ranks", "step, 2 ranks")
HANGS_AFTER = 180.0  # seconds of a life
WORST = 1e-5  # relative difference of final weights


@dataclass(frozen=True, slots=True)
class Told:  # how a story went
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
        if not any(line["kind"] == "kill" and line["life"] == number for line in diary(folder, story.ranks)):
            said = output.read_text().strip().splitlines()
            how = "hung" if ended is None else f"ended with {ended}: {said[-1] if said else ''}"
            return told(story, folder, float("nan"), [f"life {number} {how}"])
    return judged(story, folder, undisturbed or folder)


def diary(folder: Path, ranks: int) -> list[dict[str, Any]]:
    files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    return [json.loads(line) for file in files if file.is_file() for line in file.read_text().splitlines()]


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
    difference = relative_error(ours["weights"], theirs["weights"])
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
    lines = diary(folder, story.ranks)
    kinds = {kind: Counter(str(line["place"]) for line in lines if line["kind"] == kind) for kind in ("fault", "kill")}
    return Told(story, kinds["fault"], kinds["kill"], difference, tuple(broken))


def column(one: Told) -> str:
    return f"{one.story.mode}, {one.story.ranks} rank{'s' if one.story.ranks > 1 else ''}"


def summarize(stories: Sequence[Told]) -> dict[str, Any]:
    """Counts of each kind in each column, the worst difference, and what was broken."""
    columns = {}
    for name in COLUMNS:
        some = [one for one in stories if column(one) == name]
        faults, kills = (sum((getattr(one, kind) for one in some), Counter[str]()) for kind in ("faults", "kills"))
        columns[name] = {
            "runs": len(some),
            "faults": {place: faults[place] for place in PLACES},
            "kills": {moment: kills[moment] for moment in MOMENTS},
            "worst": max((one.difference for one in some), default=None),
        }
    broken = [
        f"run {number}, {one.story.model}, {column(one)}: {sentence}"
        for number, one in enumerate(stories)
        for sentence in one.broken
    ]
    return {"columns": columns, "broken": broken}


def _rows(columns: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for title, kind in (("out of memory", "faults"), ("killed", "kills")):
        yield (title, *(str(sum(one[kind].values())) for one in columns))
        for place in columns[0][kind]:
            yield (f"  {place}", *(str(one[kind][place] or "–") for one in columns))
    yield ("runs", *(str(one["runs"]) for one in columns))
    yield ("worst difference of weights", *(error(one["worst"]) for one in columns))


def text(record: Record) -> str:
    columns, broken = [record["columns"][name] for name in COLUMNS], record["broken"]
    faults, kills = (sum(sum(one[kind].values()) for one in columns) for kind in ("faults", "kills"))
    kept = "All ended, with its optimizer steps, learning rates and samples."
    return shown(
        ("",),
        (name.replace(", ", ",\n") for name in COLUMNS),
        _rows(columns),
        f"{sum(one['runs'] for one in columns)} runs of a small transformer (AdamW) and a convolutional network (SGD), "
        f"three\nepochs in fp32 each. Memory ran out {faults} times, on one rank alone; processes were\n"
        f"killed {kills} times, and resumed. Weights may differ by {WORST:.0e} of their norm from\n"
        f"those of a run that nothing happened to. Seed {record['seed']}.\n"
        + ("\n".join(["BROKEN PROMISES:", *broken]) if broken else kept),
    )


def measure(faults: int = 300, seed: int = 0) -> dict[str, Any]:
    """Tell stories until there were enough faults."""
    rng, stories, survived = random.Random(seed), list[Told](), 0
    with tempfile.TemporaryDirectory() as folder:
        alone = [tell(undisturbed(model), Path(folder, model)) for model in MODELS]
        broken = [sentence for one in alone for sentence in one.broken]
        while not broken and survived < faults:
            story = draw(rng, len(stories))
            stories.append(tell(story, Path(folder, f"run{len(stories)}"), Path(folder, story.model)))
            survived += stories[-1].faults.total()
            print(f"\rrun {len(stories)}: {survived} of {faults} errors", end="", flush=True)
    record = summarize(stories)
    broken += record["broken"]
    return {**record, "seed": seed, "broken": broken, "missed": broken}


main = benchmark("chaos", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
