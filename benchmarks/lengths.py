"""Texts of unequal length, cut as drawn, sorted, and by a budget: ``python -m benchmarks.lengths``.

A small GPT trains on definitions, and on paragraphs of Python's standard library. Times are ratios of windows that are
trained by turns; gradients are compared in fp64 with one padded pass over the window. Texts that are not named in
``--texts`` stay as they were measured.
"""

import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.output import Record, benchmark, beside_last, error, installed, shown
from benchmarks.trainers import flat, quiet_trainer, relative_error
from benchmarks.turns import take_turns
from lightning_ga import AutoAccumulate
from lightning_ga.data.sets import TextDataset, pad, read_definitions
from lightning_ga.models.gpt import GPT
from lightning_ga.weights import TargetTokens

WINDOW, MICRO_BATCH = 256, 8
WARM_UP = 1  # windows that are not timed
MOST_TOKENS, MOST_PASSES, LEAST_SPEED, MOST_ERROR = 0.6, 1 / 3, 1.6, 1e-12


def source_texts() -> list[str]:
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found = (text for path in modules for text in path.read_text(encoding="utf-8", errors="replace").split("\n\n"))
    return [text for text in found if text.strip()]


CORPORA: dict[str, tuple[Callable[[], list[str]], int]] = {  # and the most tokens of a text
    "definitions": (read_definitions, 512),
    "source": (source_texts, 1024),
}


def length_of(data: TextDataset, index: int) -> int:
    return min(len(data.texts[index].encode()) + 1, data.max_length)


PROGRAMS: dict[str, dict[str, Any]] = {
    "as drawn": {},
    **({"grouped": {}} if installed("transformers") else {}),
    "sorted": {"size_of": length_of, "max_micro_batch_size": MICRO_BATCH},
    "by budget": {"size_of": length_of},
    "by tokens": {"size_of": length_of},
}


class Reading(GPT):
    """Keeps the shape of every micro-batch, which texts are in it, and the gradient of the last step."""

    def __init__(self, longest: int, width: int, depth: int) -> None:
        torch.manual_seed(0)  # the same weights each time
        super().__init__(context=longest, width=width, depth=depth, optimizer=partial(torch.optim.SGD, lr=0.1))
        self.shapes: list[tuple[int, int]] = []
        self.steps: list[set[int]] = [set()]
        self.tokens = [0]  # of each step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.shapes.append(tuple(batch["tokens"].shape))
        self.tokens[-1] += int((batch["labels"] != -100).sum())
        self.steps[-1].update(batch["index"].tolist())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps.append(set())
        self.tokens.append(0)
        self.gradient = flat(parameter.grad for parameter in self.parameters())


class Indexed(TextDataset):
    def __init__(self, texts: Sequence[str], max_length: int) -> None:
        super().__init__(texts, max_length)
        self.lengths = [length_of(self, index) for index in range(len(self))]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


def padded(texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {**pad(texts), "index": torch.stack([text["index"] for text in texts])}


def train(data: Indexed, program: str, module: Reading, windows: int, *callbacks: pl.Callback) -> None:
    window = f"{round(WINDOW * fmean(data.lengths))} tokens" if program == "by tokens" else WINDOW
    callback = AutoAccumulate(window, micro_batch_size=MICRO_BATCH, normalize=TargetTokens(), **PROGRAMS[program])
    order: dict[str, Any] = {"shuffle": True}
    if program == "grouped":
        from transformers.trainer_pt_utils import LengthGroupedSampler

        order = {"sampler": LengthGroupedSampler(MICRO_BATCH, lengths=data.lengths)}
    loader = DataLoader(data, batch_size=MICRO_BATCH, collate_fn=padded, **order)
    pl.seed_everything(7, verbose=False)
    quiet_trainer(max_steps=windows, callbacks=[callback, *callbacks]).fit(module, loader)


def fp64_errors(data: Indexed) -> dict[str, float]:
    """Return the error of each program's first gradient to that in one padded pass over the same window."""
    errors, oracles = {}, dict[frozenset[int], Tensor]()
    for program in PROGRAMS:
        module = Reading(data.max_length, 32, 1).double()
        train(data, program, module, 1)
        window = frozenset(module.steps[0])
        if window not in oracles:
            oracle = Reading(data.max_length, 32, 1).double()
            oracle.token_loss(padded([data[index] for index in sorted(window)])).backward()
            oracles[window] = flat(parameter.grad for parameter in oracle.parameters())
        errors[program] = relative_error(module.gradient, oracles[window])
    return errors


def measured(texts: list[str], longest: int, windows: int, width: int, depth: int) -> dict[str, Any]:
    data = Indexed(texts, longest)
    modules = {name: Reading(longest, width, depth) for name in PROGRAMS}
    fits = [partial(train, data, name, modules[name], windows + WARM_UP) for name in PROGRAMS]
    watches = dict(zip(PROGRAMS, take_turns(fits, seed=0)))
    speeds = {
        name: [tokens / second for tokens, second in zip(module.tokens[WARM_UP:], watches[name].wall[WARM_UP:])]
        for name, module in modules.items()
    }
    drawn, rows, errors = modules["as drawn"], {}, fp64_errors(data)
    all_tokens = {name: sum(texts * length for texts, length in module.shapes) for name, module in modules.items()}
    for name, module in modules.items():
        tokens = sum(module.tokens)
        rows[name] = {
            "padding": 1 - tokens / all_tokens[name],  # share of the padded tokens
            "padded": all_tokens[name] / tokens / all_tokens["as drawn"] * sum(drawn.tokens),  # at the same texts
            "passes": len(module.shapes) / (windows + WARM_UP),  # of a window
            "most_padded": max(texts * length for texts, length in module.shapes),  # tokens of a pass
            "speed": median(mine / theirs for mine, theirs in zip(speeds[name], speeds["as drawn"])),
            "same_windows": module.steps == drawn.steps,
            "fp64": errors[name],  # of the first window's gradient
        }
    return {"windows": windows, "texts": len(texts), "longest": max(data.lengths), "rows": rows}


def missed(groups: Record) -> Iterator[str]:
    for name, group in groups.items():
        row, drawn = group["rows"]["by budget"], group["rows"]["as drawn"]
        within = {
            "padded tokens": row["padded"] <= MOST_TOKENS,
            "passes": row["passes"] <= MOST_PASSES * drawn["passes"],
            "speed": row["speed"] >= LEAST_SPEED,
            "windows": row["same_windows"],
            "memory": row["most_padded"] <= MICRO_BATCH * group["longest"],
            **{each: one["fp64"] <= MOST_ERROR for each, one in group["rows"].items()},
        }
        yield from (f"{name}: {what}" for what, met in within.items() if not met)


def text(record: Record) -> str:
    rows = []
    for name, group in record["groups"].items():
        for program, row in group["rows"].items():
            names = name if program == "as drawn" else "", program, "same" if row["same_windows"] else "other"
            tokens = f"{100 * row['padding']:.0f} %", f"{row['padded']:.2f}", f"{row['passes']:.0f}"
            rows.append((*names, *tokens, f"{row['most_padded']:,}", f"{row['speed']:.2f}", error(row["fp64"])))
    grouped = f"grouped: LengthGroupedSampler of transformers {record['transformers']}. "
    if record["transformers"] is None:
        grouped = "transformers, whose LengthGroupedSampler belongs here, is not installed. "
    windows = " or ".join(map(str, dict.fromkeys(group["windows"] for group in record["groups"].values())))
    return shown(
        ("texts", "cut", "steps"),
        ("waste", "padded", "passes", "most", "speed", "fp64"),
        rows,
        f"Windows of {WINDOW} texts, or of as many tokens as these have in the mean; {windows} of each "
        f"program by turns; micro-batches of {MICRO_BATCH}, or of at most {MICRO_BATCH} × the longest padded tokens. "
        f"{grouped}other: steps do not hold the samples that they hold as drawn. waste: share of padding. padded: "
        "tokens with padding ÷ as drawn, for the same texts. passes: of a window. most: padded tokens of a pass. "
        "speed: tokens a second that are no padding ÷ as drawn, median. fp64: error of the gradient to that of one "
        f"padded pass.\nTargets by budget: padded {MOST_TOKENS}, passes a third, speed {LEAST_SPEED}, fp64 1e-12.",
    )


def measure(windows: int = 3, width: int = 32, depth: int = 1, texts: Sequence[str] = (*CORPORA,)) -> dict[str, Any]:
    found = {}
    for name in texts:
        read, longest = CORPORA[name]
        found[name] = measured(read(), longest, windows, width, depth)
    groups = beside_last("lengths", "groups", found)
    record = {"width": width, "depth": depth, "transformers": installed("transformers"), "groups": groups}
    return {**record, "missed": [*missed(groups)]}


main = benchmark("lengths", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
