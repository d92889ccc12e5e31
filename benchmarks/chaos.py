"""Does a training survive errors and kills at random moments? ``python -m benchmarks.chaos``.

Two small networks train for three epochs, again and again. Memory runs out at random operations on one of the ranks;
the process, or one rank of two, is killed at random moments and resumed with another micro-batch. Every training must
end with the weights, the validation loss, the learning rates and the samples of an undisturbed one.
"""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks import disasters
from benchmarks.disasters import Disaster, Process, Scenario, train
from benchmarks.output import Record, benchmark, error, shown
from benchmarks.processes import forked
from benchmarks.trainers import relative_error

MODELS, MODES, RANKS = ("transformer", "convolutional"), ("loader", "step"), (1, 2)
COLUMNS = ("loader, 1 rank", "step, 1 rank", "loader, 2 ranks", "step, 2 ranks")
HANGS_AFTER = 180.0  # seconds of a process
WORST = 1e-5  # relative difference of final weights


def undisturbed(model: str, mode: str) -> Scenario:
    """Return the training that all others of a model must equal: one rank, the whole batch, no disaster."""
    return Scenario(model, mode, 1, (Process(disasters.EFFECTIVE, 100, (), None),))


def draw(rng: random.Random, number: int) -> Scenario:
    """Return a random scenario; all combinations of model, mode and ranks take turns."""
    model, mode, ranks = [*product(MODELS, MODES, RANKS)][number % 8]
    kills = rng.randint(1, 3)
    return Scenario(model, mode, ranks, tuple(_process(rng, ranks, killed=n < kills) for n in range(kills + 1)))


def _process(rng: random.Random, ranks: int, *, killed: bool) -> Process:
    passes = [disasters.FORWARD] * 3 + [disasters.FIRST] * 2 + [disasters.LATER] * 3
    places = [*rng.sample(passes, 5), disasters.TRANSFER, disasters.VALIDATION, disasters.VALIDATION]
    errors = tuple(_disaster(rng, place, ranks, latest=4 if place == disasters.VALIDATION else 6) for place in places)
    kill = _disaster(rng, rng.choice(disasters.MOMENTS), ranks, latest=6) if killed else None
    if kill is not None and kill.place in (disasters.WRITE, disasters.WRITTEN):
        kill = Disaster(kill.place, 0, min(kill.visit, 3), kill.operation)  # rank 0 writes
    return Process(rng.choice((64, 48, 32, 24)) // ranks, rng.randint(1, 3), errors, kill)


def _disaster(rng: random.Random, place: str, ranks: int, *, latest: int) -> Disaster:
    return Disaster(place, rng.randrange(ranks), rng.randint(1, latest), rng.random())


def run(scenario: Scenario, folder: Path, expected: Path | None = None) -> dict[str, Any]:
    """Run the processes of a scenario one after another, and compare the end with the undisturbed training's."""
    folder.mkdir(parents=True)
    for number in range(len(scenario.processes)):
        output = folder / f"process{number}.txt"
        code, _ = forked(partial(train, scenario, number, folder), output, hangs_after=HANGS_AFTER)
        if code == 0:
            break
        if not any(line["kind"] == "kill" and line["process"] == number for line in diary(folder, scenario.ranks)):
            lines = output.read_text().strip().splitlines()
            how = "hung" if code is None else f"ended with {code}: {lines[-1] if lines else ''}"
            return summary(scenario, folder, float("nan"), [f"process {number} {how}"])
    return compared(scenario, folder, expected or folder)


def diary(folder: Path, ranks: int) -> list[dict[str, Any]]:
    files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    return [json.loads(line) for file in files if file.is_file() for line in file.read_text().splitlines()]


def last_run_of_steps(lines: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of each optimizer step; of a step that was run again after a kill, those of the last process.

    Examples:
        >>> lines = [{"kind": "step", "step": 1, "process": process} for process in (0, 1, 1)]
        >>> last_run_of_steps(lines)[1] == lines[1:]
        True
    """
    steps = [line for line in lines if line["kind"] == "step"]
    latest = {line["step"]: line["process"] for line in sorted(steps, key=itemgetter("step", "process"))}
    return {step: [x for x in steps if (x["step"], x["process"]) == (step, last)] for step, last in latest.items()}


def compared(scenario: Scenario, folder: Path, expected: Path) -> dict[str, Any]:
    ours, theirs = torch.load(folder / "end0.pt"), torch.load(expected / "end0.pt")
    steps, undisturbed = last_run_of_steps(diary(folder, scenario.ranks)), last_run_of_steps(diary(expected, 1))
    difference = relative_error(ours["weights"], theirs["weights"])
    promises = {
        f"weights differ by {difference:.1e}": difference <= WORST,
        f"validation loss {ours['loss']} instead of {theirs['loss']}": ours["loss"] is None
        or abs(ours["loss"] - theirs["loss"]) <= WORST * abs(theirs["loss"]),
        f"{ours['steps']} optimizer steps instead of {theirs['steps']}": ours["steps"] == theirs["steps"],
        "other learning rates": [lines[0]["rate"] for lines in steps.values()]
        == [lines[0]["rate"] for lines in undisturbed.values()],
    }
    broken = [sentence for sentence, kept in promises.items() if not kept]
    return summary(scenario, folder, difference, [*broken, *wrong_samples(steps)])


def wrong_samples(steps: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Return the epochs in which not every sample was used exactly once.

    Examples:
        >>> wrong_samples({1: [{"epoch": 0, "used": [*range(200)]}], 2: [{"epoch": 1, "used": [0, 0]}]})
        ['epoch 1: 199 samples missing, 1 more than once']
    """
    used: dict[int, Counter[int]] = {}
    for line in chain.from_iterable(steps.values()):
        used.setdefault(line["epoch"], Counter()).update(line["used"])
    return [
        f"epoch {epoch}: {disasters.SAMPLES - len(counts)} samples missing, {repeated} more than once"
        for epoch, counts in used.items()
        if (repeated := sum(count > 1 for count in counts.values())) or len(counts) != disasters.SAMPLES
    ]


def summary(scenario: Scenario, folder: Path, difference: float, broken: Sequence[str]) -> dict[str, Any]:
    places = {kind: Counter[str]() for kind in ("step", "error", "kill")}
    for line in diary(folder, scenario.ranks):
        places[line["kind"]].update([line.get("place", "")])
    column = f"{scenario.mode}, {scenario.ranks} rank{'s' if scenario.ranks > 1 else ''}"
    named = [f"{scenario.model}, {column}: {sentence}" for sentence in broken]
    return {"column": column, "faults": places["error"], "kills": places["kill"], "worst": difference, "broken": named}


def summarize(results: Sequence[Record]) -> dict[str, Any]:
    """Return the counts of each place in each column, the worst difference, and the broken promises."""
    columns = {}
    for name in COLUMNS:
        some = [one for one in results if one["column"] == name]
        columns[name] = {
            "runs": len(some),
            "faults": {place: sum(one["faults"][place] for one in some) for place in disasters.PLACES},
            "kills": {moment: sum(one["kills"][moment] for one in some) for moment in disasters.MOMENTS},
            "worst": max((one["worst"] for one in some), default=None),
        }
    return {"columns": columns, "broken": [f"run {n}, {x}" for n, one in enumerate(results) for x in one["broken"]]}


def text(record: Record) -> str:
    rows, totals = [], {"faults": Counter[str](), "kills": Counter[str]()}
    for name in COLUMNS:
        one = record["columns"][name]
        counts = (str(one["runs"]), *(str(sum(one[kind].values())) for kind in totals), error(one["worst"]))
        rows.append((name, *counts))
        for kind, places in totals.items():
            places.update(one[kind])
    errors, kills = ("; ".join(f"{place} {number}" for place, number in each.items()) for each in totals.values())
    kept = "All ended, each with its optimizer steps, learning rates and samples."
    return shown(
        ("",),
        ("runs", "out of memory", "killed", "worst difference"),
        rows,
        f"Runs of a small transformer (AdamW) and a convolutional network (SGD), three epochs in fp32 each. Memory ran "
        f"out on one rank alone: {errors}. Processes were killed, and resumed: {kills}. The difference is that of the "
        f"final weights from those of an undisturbed run, relative to their norm; at most {WORST:.0e}. Seed "
        f"{record['seed']}.\n" + ("\n".join(["BROKEN PROMISES:", *record["broken"]]) if record["broken"] else kept),
    )


def measure(errors: int = 300, kills: int = 30, seed: int = 0) -> dict[str, Any]:
    """Run scenarios until there were enough errors and kills."""
    rng, results, broken = random.Random(seed), list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for model, mode in product(MODELS, MODES):
            broken += run(undisturbed(model, mode), Path(folder, f"{model}, {mode}"))["broken"]
        survived, resumed = 0, 0
        while not broken and (survived < errors or resumed < kills):
            scenario = draw(rng, len(results))
            order = scenario.mode if scenario.ranks == 1 else "loader"  # ranks share a shuffled order in either mode
            expected = Path(folder, f"{scenario.model}, {order}")
            results.append(run(scenario, Path(folder, f"run{len(results)}"), expected))
            survived += results[-1]["faults"].total()
            resumed += results[-1]["kills"].total()
            print(f"\rrun {len(results)}: {survived} errors, {resumed} kills", end="", flush=True)
    record = summarize(results)
    broken += record["broken"]
    return {**record, "seed": seed, "broken": broken, "missed": broken}


main = benchmark("chaos", __doc__, measure, text, quick={"errors": 20, "kills": 2})

if __name__ == "__main__":
    raise SystemExit(main())
