"""Does the audit find and name wrong accumulation? ``python -m benchmarks.audit``.

A right loop and twenty mutants of it train five models for two epochs of eleven micro-batches, of four a window. Each
is audited. The time of an audit is compared with that of the same two epochs alone, in float32.
"""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name PyTorch users know)

from benchmarks.output import at_least, at_most, plain, shown
from lightning_ga.audit import Audit, audit
from lightning_ga.errors import UserError
from lightning_ga.models.gpt import Decoder

FACTOR, MICRO_BATCHES, TAIL, EPOCHS = 4, 11, 3, 2
MAX_NORM = 1.0  # of the model that is clipped: some steps are, others are not
LEGEND = "Time: processor seconds of an audit ÷ those of the same two epochs without."
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its batches and loss."""

    model: nn.Module
    batches: Sequence[Any]
    loss: Loss
    size: Callable[[Any], float] = len
    max_norm: float | None = None
    weight_decay: float = 0.0


class TwoTowers(nn.Module):
    """Two encoders whose outputs of one sample belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 32), nn.Linear(12, 32)

    def forward(self, pairs: Tensor) -> Tensor:
        return F.normalize(self.one(pairs[:, 0])) @ F.normalize(self.other(pairs[:, 1])).T / 0.1


def regression(sizes: Sequence[int] = (8,) * MICRO_BATCHES, **settings: Any) -> Task:
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    batches = [torch.randn(size, 13) for size in sizes]
    return Task(model, batches, lambda net, batch: F.mse_loss(net(batch[:, 1:]), batch[:, :1]), **settings)


def images() -> Task:
    layers = (nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU())
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 25, 10))
    batches = [(torch.randn(8, 3, 14, 14), torch.randint(10, (8,))) for _ in range(MICRO_BATCHES)]
    return Task(
        model, batches, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), lambda batch: len(batch[0])
    )


def texts() -> Task:
    batches = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(50, (4, 12))
        batches.append((tokens, tokens.roll(-1, 1).masked_fill(torch.arange(12) >= torch.randint(2, 12, (4, 1)), -100)))
    return Task(Decoder(50, 12, 32, 2, 4), batches, token_loss, lambda batch: float((batch[1] != -100).sum()))


def token_loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())


def pairs() -> Task:
    batches = [torch.randn(8, 2, 12) for _ in range(MICRO_BATCHES)]
    return Task(TwoTowers(), batches, lambda net, batch: F.cross_entropy(net(batch), torch.arange(len(batch))))


TASKS: dict[str, Callable[[], Task]] = {
    "MLP": regression,
    "CNN": images,
    "GPT, token means": texts,
    "two towers": pairs,
    "MLP, decay, clipping": partial(regression, max_norm=MAX_NORM, weight_decay=0.1),
}

MUTANTS = {
    "summed": "sum",
    "summed over items": "sum",
    "tail divided by the factor": "last window divided by the factor",
    "tail zeroed": "dropped",
    "tail never read": "dropped",
    "tail carried over": "carried over",
    "zeroed before every backward": "only the last",
    "zeroed before the step": "dropped",
    "zeroed after the first": "dropped",
    "every second skipped": "dropped",
    "never zeroed": "carried over",
    "zeroed every second step": "carried over",
    "a step after each, zeroed at the end": "carried over",
    "divided twice": "scaled",
    "divided by one too many": "scaled",
    "the first not divided": "other weights",
    "weights that decay": "other weights",
    "noise added": "not a combination",
    "one layer scaled": "not a combination",
    "another loss": "not a combination",
    "unequal micro-batches averaged": "mean over micro-batches",
}
"""Mutants and their names; the last one runs only where micro-batches are unequal."""


def weight(mutant: str, place: int, sizes: Sequence[float]) -> float:
    """What a micro-batch's mean loss is multiplied by."""
    window = range(place // FACTOR * FACTOR, min(place // FACTOR * FACTOR + FACTOR, len(sizes)))
    right = sizes[place] / sum(sizes[each] for each in window)
    first = place == window[0]
    return {
        "summed": 1.0,
        "summed over items": sizes[place],
        "tail divided by the factor": right if len(window) == FACTOR else 1 / FACTOR,
        "tail carried over": right if len(window) == FACTOR else 1 / FACTOR,
        "divided twice": right / FACTOR,
        "divided by one too many": right * FACTOR / (FACTOR + 1),
        "the first not divided": 1.0 if first else right,
        "weights that decay": right * 0.5 ** (place - window[0]),
        "a step after each, zeroed at the end": 1 / FACTOR,
        "unequal micro-batches averaged": 1 / len(window),
    }.get(mutant, right)


def train(task: Task, mutant: str = "") -> None:
    """The loop, and what is wrong with it."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3, weight_decay=task.weight_decay)
    optimizer.zero_grad()
    sizes = [float(task.size(batch)) for batch in task.batches]
    steps = 0
    for _ in range(EPOCHS):
        if mutant == "tail zeroed":
            optimizer.zero_grad()
        for place in range(MICRO_BATCHES - TAIL if mutant == "tail never read" else MICRO_BATCHES):
            if mutant == "zeroed before every backward":
                optimizer.zero_grad()
            if not (mutant == "every second skipped" and place % 2 == 0 and place != MICRO_BATCHES - 1):
                backward(task, mutant, place, sizes)
            if mutant == "zeroed after the first" and place % FACTOR == 0:
                optimizer.zero_grad()
            is_end = (place + 1) % FACTOR == 0
            if place + 1 == MICRO_BATCHES and mutant not in ("tail zeroed", "tail carried over"):
                is_end = True
            if not is_end and mutant != "a step after each, zeroed at the end":
                continue
            spoil(task, mutant)
            if task.max_norm is not None:
                nn.utils.clip_grad_norm_(task.model.parameters(), task.max_norm)
            if mutant == "zeroed before the step":
                optimizer.zero_grad()
            optimizer.step()
            steps += 1
            if is_end and mutant != "never zeroed" and not (mutant == "zeroed every second step" and steps % 2):
                optimizer.zero_grad()


def backward(task: Task, mutant: str, place: int, sizes: Sequence[float]) -> None:
    loss = task.loss(task.model, task.batches[place])
    if mutant == "another loss":
        loss = loss + 0.01 * sum(each.square().sum() for each in task.model.parameters())
    (loss * weight(mutant, place, sizes)).backward()


def spoil(task: Task, mutant: str) -> None:
    """Change the gradients before a step."""
    parameters = [each for each in task.model.parameters() if each.grad is not None]
    if mutant == "noise added":
        for parameter in parameters:
            parameter.grad += 0.01 * torch.randn_like(parameter)
    if mutant == "one layer scaled":
        parameters[0].grad *= 0.1


def audited(task: Task, mutant: str = "") -> Audit:
    run = partial(train, task, mutant)
    return audit(run, model=task.model, micro_batches=task.batches, loss=task.loss, sizes=task.size)


def row(name: str, make: Callable[[], Task], repeats: int) -> dict[str, Any]:
    """Audit the right loop and all mutants with one model."""
    torch.manual_seed(0)
    task = make()
    start = deepcopy(task.model.state_dict())
    record: dict[str, Any] = {"model": name, "mutants": {}, "trained_s": [], "audited_s": []}
    for _ in range(repeats):
        task.model.load_state_dict(start)
        seconds = time.process_time()
        train(task)
        record["trained_s"].append(time.process_time() - seconds)
        task.model.load_state_dict(start)
        seconds = time.process_time()
        found = audited(task)
        record["audited_s"].append(time.process_time() - seconds)
    record["right"] = {"is_right": found.is_right, "verdict": found.verdict, "residual": residual(found)}
    is_unequal = len({task.size(batch) for batch in task.batches}) > 1
    for mutant, expected in MUTANTS.items():
        if mutant == "unequal micro-batches averaged" and not is_unequal:
            continue
        task.model.load_state_dict(start)
        try:
            found = audited(task, mutant)
            is_found, verdict = not found.is_right, str(found.verdict)
        except UserError as error:
            is_found, verdict = False, str(error)
        record["mutants"][mutant] = {"is_found": is_found, "verdict": verdict, "expected": expected}
    return record


def residual(found: Audit) -> float:
    return max(step.residual for step in found.steps)


def measure(repeats: int = 20) -> dict[str, Any]:
    rows = [row(name, make, repeats) for name, make in TASKS.items()]
    all_mutants = [mutant for one in rows for mutant in one["mutants"].values()]
    named = [mutant["is_found"] and mutant["verdict"] == mutant["expected"] for mutant in all_mutants]
    slowest = max(min(one["audited_s"]) / min(one["trained_s"]) for one in rows)
    targets = (
        at_least("wrong loops found and named", sum(named) / len(named), 0.95),
        at_most("right loops called wrong", sum(not one["right"]["is_right"] for one in rows), 0),
        at_most("time of an audit ÷ time of its two epochs", slowest, 3.0),
    )
    return {"repeats": repeats, "rows": rows, "targets": plain(targets)}


def text(record: Any) -> str:
    rows = []
    for one in record["rows"]:
        mutants = one["mutants"].values()
        found = sum(mutant["is_found"] for mutant in mutants)
        named = sum(mutant["is_found"] and mutant["verdict"] == mutant["expected"] for mutant in mutants)
        ratio = min(one["audited_s"]) / min(one["trained_s"])
        of = len(one["mutants"])
        right = "right" if one["right"]["is_right"] else "WRONG"
        numbers = (right, f"{found} of {of}", f"{named} of {of}", f"{one['right']['residual']:.0e}", f"{ratio:.1f}")
        rows.append((one["model"], *numbers))
    return shown(("model",), ("right loop", "found", "and named", "residual", "time"), rows, LEGEND)


def main(arguments: Sequence[str] | None = None) -> int:
    from benchmarks.output import benchmark

    return benchmark("audit", __doc__, measure, text, quick={"repeats": 1})(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
