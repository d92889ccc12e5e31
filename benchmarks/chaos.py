"""Does a run survive everything at once? ``python -m benchmarks.chaos --faults 300 --seed 0``.

A small transformer and a small convolutional network, three epochs each, again and again. Memory runs
out at random operations of random places, on one of the ranks; the process, or one rank of two, is
killed (``SIGKILL``) at random moments and resumed with another micro-batch, now and then on other
hardware. Every run has to end, with the weights, the validation loss, the learning rates and the
samples of a run that nothing happened to. Exits with 1 if one of them does not.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.disasters.stories import MODELS, MOMENTS, PLACES, draw, undisturbed
from benchmarks.disasters.telling import WORST, Told, tell
from benchmarks.output import as_text, conclude, empty_table, error, options
from benchmarks.trainers import quiet

COLUMNS = ("loader, 1 rank", "step, 1 rank", "loader, 2 ranks", "step, 2 ranks")


def column(one: Told) -> str:
    """Where a story is counted."""
    return f"{one.story.mode}, {one.story.ranks} rank{'s' if one.story.ranks > 1 else ''}"


def summarize(stories: Sequence[Told]) -> dict[str, Any]:
    """Counts of each kind in each column, the worst difference, and what was broken."""
    columns = {}
    for name in COLUMNS:
        some = [one for one in stories if column(one) == name]
        faults = sum((one.faults for one in some), Counter())
        kills = sum((one.kills for one in some), Counter())
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


def table(record: Mapping[str, Any]) -> Table:
    """A row for each kind of misfortune."""
    shown = empty_table(("",), (name.replace(", ", ",\n") for name in COLUMNS))
    columns = [record["columns"][name] for name in COLUMNS]
    for title, kind in (("out of memory", "faults"), ("killed", "kills")):
        shown.add_row(title, *(str(sum(one[kind].values())) for one in columns))
        for place in columns[0][kind]:
            shown.add_row(f"  {place}", *(str(one[kind][place] or "–") for one in columns))
        shown.add_section()
    shown.add_row("runs", *(str(one["runs"]) for one in columns))
    shown.add_row("worst difference of weights", *(error(one["worst"]) for one in columns))
    return shown


def text(record: Mapping[str, Any]) -> str:
    columns = record["columns"].values()
    faults, kills = (sum(sum(one[kind].values()) for one in columns) for kind in ("faults", "kills"))
    runs, broken = sum(one["runs"] for one in columns), record["broken"]
    legend = (
        f"{runs} runs of a small transformer (AdamW) and a convolutional network (SGD), three\n"
        f"epochs in fp32 each. Memory ran out {faults} times, on one rank alone; processes were\n"
        f"killed {kills} times, and resumed. Weights may differ by {WORST:.0e} of their norm from\n"
        f"those of a run that nothing happened to. Seed {record['seed']}.\n"
    )
    kept = "All ended, with its optimizer steps, learning rates and samples."
    return as_text(table(record), legend + ("\n".join(["BROKEN PROMISES:", *broken]) if broken else kept))


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell stories until there were enough faults, show, write; 1 if a promise was broken."""
    parser = options("chaos", __doc__)
    parser.add_argument("--faults", type=int, default=300, help="out-of-memory errors, at least")
    parser.add_argument("--seed", type=int, default=0, help="decides what happens")
    parser.add_argument("--keep", type=Path, help="folder for diaries and output of all runs")
    settings = parser.parse_args(arguments)
    quiet()
    start, rng, stories = time.perf_counter(), random.Random(settings.seed), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = settings.keep or Path(temporary)
        alone = [tell(undisturbed(model), folder / model) for model in MODELS]
        broken = [sentence for one in alone for sentence in one.broken]
        while not broken and sum(one.faults.total() for one in stories) < settings.faults:
            story = draw(rng, len(stories))
            stories.append(tell(story, folder / f"run{len(stories)}", folder / story.model))
            survived = sum(one.faults.total() for one in stories)
            print(f"\rrun {len(stories)}: {survived} of {settings.faults} errors", end="", flush=True)
    record = {"seed": settings.seed, "seconds": round(time.perf_counter() - start, 1), **summarize(stories)}
    record["broken"] += broken
    return conclude("chaos", record, text, record["broken"])


if __name__ == "__main__":
    sys.exit(main())
