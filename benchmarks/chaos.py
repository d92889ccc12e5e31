"""Does a run survive everything at once? ``python -m benchmarks.chaos --faults 300 --seed 0``.

Two small networks, three epochs each, again and again. Memory runs out at random operations on one of the ranks; the
process, or one rank of two, is killed at random moments and resumed with another micro-batch. Every run has to end with
the weights, the validation loss, the learning rates and the samples of a run that nothing happened to.
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.disasters.stories import MODELS, MOMENTS, PLACES, draw, undisturbed
from benchmarks.disasters.telling import WORST, Told, tell
from benchmarks.output import Record, benchmark, error, shown

COLUMNS = ("loader, 1 rank", "step, 1 rank", "loader, 2 ranks", "step, 2 ranks")


def column(one: Told) -> str:
    """Where a story is counted."""
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
    """A row for each kind of misfortune."""
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
    sys.exit(main())
