"""Texts of unequal length, cut as drawn, sorted, and by a budget: ``python -m benchmarks.lengths``.

A small GPT trains on definitions, and on paragraphs of Python's standard library, in windows of 256 texts, or of as
many tokens as 256 texts have in the mean, at a micro-batch of 8 or at as many padded tokens as 8 of the longest have.
``grouped`` draws by the ``LengthGroupedSampler`` of Hugging Face's transformers, and is left out where that is not
installed. Times are ratios of windows that are trained by turns; gradients are compared in fp64 with one padded pass
over the window. Exits with 1 if a target is missed.
"""

import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.output import RESULTS, as_text, conclude, empty_table, error, installed, options, read_json
from benchmarks.trainers import quiet, quiet_trainer
from benchmarks.turns import Stopwatch, take_turns
from lightning_ga import AutoAccumulate
from lightning_ga.data.sets import TextDataset, pad, read_definitions
from lightning_ga.models.gpt import GPT
from lightning_ga.weights import TargetTokens

WINDOW, MICRO_BATCH = 256, 8
WARM_UP = 1  # windows that are not timed
MOST_TOKENS, MOST_PASSES, LEAST_SPEED, MOST_ERROR = 0.6, 1 / 3, 1.6, 1e-12
SEED = 7


def source_texts() -> list[str]:
    """Return the paragraphs of the modules of Python's standard library."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found = (text for path in modules for text in path.read_text(encoding="utf-8", errors="replace").split("\n\n"))
    return [text for text in found if text.strip()]


CORPORA: dict[str, tuple[Callable[[], list[str]], int]] = {  # and the most tokens of a text
    "definitions": (read_definitions, 512),
    "source": (source_texts, 1024),
}


def length_of(data: TextDataset, index: int) -> int:
    """Return the tokens of a text."""
    return min(len(data.texts[index].encode()) + 1, data.max_length)


PROGRAMS: dict[str, dict[str, Any]] = {
    "as drawn": {},
    **({"grouped": {}} if installed("transformers") else {}),
    "sorted": {"size_of": length_of, "max_micro_batch_size": MICRO_BATCH},
    "by budget": {"size_of": length_of},
    "by tokens": {"size_of": length_of},
}


class Reading(GPT):
    """Keeps the shape of every micro-batch, which texts are in it, and the gradients of every step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.shapes: list[tuple[int, int]] = []
        self.steps: list[set[int]] = [set()]
        self.tokens = [0]  # of each step
        self.gradients: list[Tensor] | None = None  # kept if that is a list

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note what the batch holds."""
        self.shapes.append(tuple(batch["tokens"].shape))
        self.tokens[-1] += int((batch["labels"] != -100).sum())
        self.steps[-1].update(batch["index"].tolist())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note that the window is over."""
        self.steps.append(set())
        self.tokens.append(0)
        if self.gradients is not None:
            self.gradients.append(gradient_of(self))


def gradient_of(module: pl.LightningModule) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


class Indexed(TextDataset):
    """Texts that know their places."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


def padded(texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch as long as its longest text."""
    return {**pad(texts), "index": torch.stack([text["index"] for text in texts])}


class WindowWatch(Stopwatch):
    """Times windows of as many micro-batches as are planned."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read how many these are."""
        self.factor = trainer.accumulate_grad_batches
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def train(data: TextDataset, program: str, module: Reading, windows: int, *callbacks: pl.Callback) -> None:
    """Train some windows."""
    lengths = [length_of(data, index) for index in range(len(data))]
    window = f"{round(WINDOW * fmean(lengths))} tokens" if program == "by tokens" else WINDOW
    callback = AutoAccumulate(window, micro_batch_size=MICRO_BATCH, normalize=TargetTokens(), **PROGRAMS[program])
    order: dict[str, Any] = {"shuffle": True}
    if program == "grouped":
        from transformers.trainer_pt_utils import LengthGroupedSampler

        order = {"sampler": LengthGroupedSampler(MICRO_BATCH, lengths=lengths)}
    loader = DataLoader(data, batch_size=MICRO_BATCH, collate_fn=padded, **order)
    pl.seed_everything(SEED, verbose=False)
    quiet_trainer(max_steps=windows, callbacks=[callback, *callbacks]).fit(module, loader)


def model(width: int, depth: int, longest: int) -> Reading:
    """The same weights each time."""
    torch.manual_seed(0)
    return Reading(context=longest, width=width, depth=depth, optimizer=partial(torch.optim.SGD, lr=0.1))


def fp64_errors(data: TextDataset) -> dict[str, float]:
    """Return the error of each program's first gradient to that in one padded pass over the same window."""
    errors, oracles = {}, dict[frozenset[int], Tensor]()
    for program in PROGRAMS:
        module = model(32, 1, data.max_length).double()
        module.gradients = []
        train(data, program, module, 1)
        window = frozenset(module.steps[0])
        if window not in oracles:
            oracles[window] = whole_gradient(data, window)
        errors[program] = float((module.gradients[0] - oracles[window]).norm() / oracles[window].norm())
    return errors


def whole_gradient(data: TextDataset, window: Set[int]) -> Tensor:
    """Return the gradient in one padded pass, in fp64."""
    oracle = model(32, 1, data.max_length).double()
    oracle.token_loss(padded([data[index] for index in sorted(window)])).backward()
    return gradient_of(oracle)


def measured(texts: list[str], longest: int, windows: int, width: int, depth: int) -> dict[str, Any]:
    """Measure all programs on a corpus."""
    data = Indexed(texts, longest)
    modules = {name: model(width, depth, longest) for name in PROGRAMS}
    fits = [partial(train, data, name, modules[name], windows + WARM_UP) for name in PROGRAMS]
    watches = dict(zip(PROGRAMS, take_turns(fits, [1] * len(fits), watch=WindowWatch, seed=0)))
    speeds = {
        name: [tokens / second for tokens, second in zip(module.tokens[WARM_UP:], watches[name].wall[WARM_UP:])]
        for name, module in modules.items()
    }
    drawn, rows, errors = modules["as drawn"], {}, fp64_errors(data)
    for name, module in modules.items():
        total, tokens = padded_of(module), sum(module.tokens)
        rows[name] = {
            "padding": 1 - tokens / total,  # share of the padded tokens
            "padded": total / tokens / padded_of(drawn) * sum(drawn.tokens),  # ÷ as drawn, at the same texts
            "passes": len(module.shapes) / (windows + WARM_UP),  # of a window
            "most_padded": max(texts * length for texts, length in module.shapes),  # tokens of a pass
            "speed": median(mine / theirs for mine, theirs in zip(speeds[name], speeds["as drawn"])),
            "same_windows": module.steps == drawn.steps,
            "fp64": errors[name],  # of the first window's gradient
        }
    longest = max(length_of(data, index) for index in range(len(data)))
    return {"windows": windows, "texts": len(texts), "longest": longest, "rows": rows}


def padded_of(module: Reading) -> int:
    """Return the tokens of all micro-batches with their padding."""
    return sum(rows * columns for rows, columns in module.shapes)


def missed(groups: Mapping[str, Any]) -> list[str]:
    """Return the targets that cutting by budget misses."""
    found = []
    for name, group in groups.items():
        row, drawn = group["rows"]["by budget"], group["rows"]["as drawn"]
        found += [f"{name}: padded tokens"] if row["padded"] > MOST_TOKENS else []
        found += [f"{name}: passes"] if row["passes"] > MOST_PASSES * drawn["passes"] else []
        found += [f"{name}: speed"] if row["speed"] < LEAST_SPEED else []
        found += [f"{name}: windows"] if not row["same_windows"] else []
        found += [f"{name}: memory"] if row["most_padded"] > MICRO_BATCH * group["longest"] else []
        found += [f"{name}: {each}" for each, one in group["rows"].items() if one["fp64"] > MOST_ERROR]
    return found


def table(groups: Mapping[str, Any]) -> Table:
    shown = empty_table(("texts", "cut", "steps"), ("waste", "padded", "passes", "most", "speed", "fp64"))
    for name, group in groups.items():
        for number, (program, row) in enumerate(group["rows"].items()):
            steps = "same" if row["same_windows"] else "other"
            tokens = f"{100 * row['padding']:.0f} %", f"{row['padded']:.2f}", f"{row['passes']:.0f}"
            most, speed = f"{row['most_padded']:,}", f"{row['speed']:.2f}"
            shown.add_row("" if number else name, program, steps, *tokens, most, speed, error(row["fp64"]))
        shown.add_section()
    return shown


def text(record: Mapping[str, Any]) -> str:
    """Table and legend of a record."""
    grouped = f"grouped: LengthGroupedSampler of transformers {record['transformers']}. "
    if record["transformers"] is None:
        grouped = "transformers, whose LengthGroupedSampler belongs here, is not installed. "
    windows = " or ".join(map(str, dict.fromkeys(group["windows"] for group in record["groups"].values())))
    legend = (
        f"Windows of {WINDOW} texts, or of as many tokens as these have in the mean; {windows} of each "
        f"program by turns; micro-batches of {MICRO_BATCH}, or of at most {MICRO_BATCH} × the longest padded tokens. "
        f"{grouped}other: steps do not hold the samples that they hold as drawn. waste: share of padding. padded: "
        "tokens with padding ÷ as drawn, for the same texts. passes: of a window. most: padded tokens of a pass. "
        "speed: tokens a second that are no padding ÷ as drawn, median. fp64: error of the gradient to that of one "
        f"padded pass.\nTargets by budget: padded {MOST_TOKENS}, passes a third, speed {LEAST_SPEED}, fp64 1e-12."
    )
    return as_text(table(record["groups"]), legend)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, write; 1 if a target is missed."""
    parser = options("lengths", __doc__)
    parser.add_argument("--windows", type=int, default=3, help="windows of each program")
    parser.add_argument("--width", type=int, default=32, help="of the model")
    parser.add_argument("--depth", type=int, default=1, help="of the model")
    parser.add_argument("--texts", nargs="*", default=list(CORPORA), help="the others stay as they were measured")
    settings = parser.parse_args(arguments)
    quiet()
    sizes, found = (settings.windows, settings.width, settings.depth), {}
    for name in settings.texts:
        read, longest = CORPORA[name]
        found[name] = measured(read(), longest, *sizes)
    known = read_json("lengths")["groups"] if (RESULTS / "lengths.json").exists() else {}
    groups = {name: {**known, **found}[name] for name in CORPORA if name in {**known, **found}}
    record = {
        "width": settings.width,
        "depth": settings.depth,
        "transformers": installed("transformers"),
        "missed": missed(groups),
        "groups": groups,
    }
    return conclude("lengths", record, text, record["missed"])


if __name__ == "__main__":
    sys.exit(main())
