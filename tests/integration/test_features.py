"""Features of Lightning beside ours: each row of docs/concepts/lightning.md, in both modes, also after an OOM.

The oracle is the same Trainer without the callback: one batch of the recipe in one pass. Most rows are scenarios of
tests/differential, which runs them in every mode; here are those that need more than that.
"""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults import Arm, Faults
from lightning.pytorch.callbacks import LearningRateFinder
from pairing import every_pair
from reference import Regression, Samples, fit, loss, network, plain_loop, worst_error
from scenarios import CASES, REFUSED
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError, plan_accumulation

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
TABLE = Path(__file__).parents[2] / "docs" / "concepts" / "lightning.md"
BATCH, MICRO_BATCH, SIZE = 16, 5, 64
ROWS: set[str] = set()
BOTH, MAYBE = ("loader", "step"), {"": False, "oom": True}
MODES = pytest.mark.parametrize("mode", BOTH)


def row(*names: str) -> Callable[[Any], Any]:
    """The rows of the table that a test shows."""
    ROWS.update(names)
    return lambda test: test


def train(*callbacks: Any, mode: str | None = None, oom: bool = False, module: Any = None, **settings: Any) -> Any:
    """A fit of the recipe; ``mode``: with the callback; ``oom``: memory runs out in the second step of training."""
    module = Regression() if module is None else module
    data = settings.pop("data", None) or DataLoader(Samples(SIZE), batch_size=BATCH)
    if mode is None:
        return fit(data, *callbacks, module=module, **settings)
    ours = AutoAccumulate(micro_batch_size=MICRO_BATCH, micro_batching=mode, verify=False, batch_norm="ignore")
    faults = Faults(*((70,) if oom else ()))
    with faults:
        result = fit(data, ours, *callbacks, *((Arm(faults),) if oom else ()), module=module, **settings)
    assert ours.oom_events == int(oom)
    return result


def same_weights(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-10, atol=1e-10)


class LogsByConstant(Regression):
    """Gives the size of its batches as a constant, as Lightning asks for where it cannot tell."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        value = super().training_step(batch, batch_idx)
        self.log("loss", value, on_epoch=True, on_step=False, batch_size=self.size or len(batch[0]))
        if len(rare := batch[1][batch[1] > 0.5]):  # of which pieces may hold as many, though they are counted
            self.log("rare", rare.mean(), on_epoch=True, on_step=False, batch_size=len(rare))
        return value

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = next(self.parameters()).grad.norm()
        self.log("norm", norm, on_epoch=True, on_step=False, batch_size=self.size)


@every_pair(size=[BATCH, 1, None], mode=BOTH, oom=MAYBE)
def test_a_constant_batch_size_of_what_is_logged_is_that_of_the_recipe(mode: str, oom: bool, size: int | None) -> None:
    """A mean over the epoch is the same, whoever follows it; Lightning keeps it in single precision.

    So are means over some of the samples, by their number, and of what hooks of the optimizer's step log.
    """
    data = DataLoader(Samples(SIZE - 2), batch_size=BATCH)
    means = [
        train(mode=how, oom=oom and how is not None, module=LogsByConstant(size), data=data)[1].callback_metrics
        for how in (None, mode)
    ]
    assert {"loss", "rare", "norm"} == means[0].keys()
    torch.testing.assert_close(*means, rtol=1e-6, atol=0.0)


@row("`LearningRateFinder`")
@MODES
def test_the_learning_rate_finder(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the recipe as it is, and training goes on cut."""
    found = []
    for name, given in (("stock", {}), ("ours", {"mode": mode})):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        finder = LearningRateFinder(num_training_steps=30, early_stop_threshold=None)
        module, trainer = train(finder, enable_checkpointing=True, **given)
        found.append((finder.optimal_lr.suggestion(), module.lr, trainer.global_step))
    assert found[0][:2] == found[1][:2]
    assert found[1][2] == 2 * SIZE // BATCH  # stock Lightning 2.5.0 takes fewer after its finder
    assert max(len(indices) for _, indices in module.micro_batches[30:]) <= MICRO_BATCH


@row("`torch.compile`")
@every_pair(what=["module", "net"], mode=BOTH, oom=MAYBE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules(mode: str, oom: bool, what: str) -> None:
    """The whole module or a part of it, whatever sizes its batches have."""

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss(self.net, batch[0], batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    stock, _ = train(module=Plain())
    module = Plain()
    if what == "net":
        module.net = torch.compile(module.net, backend="aot_eager")
    train(module=torch.compile(module, backend="aot_eager") if what == "module" else module, mode=mode, oom=oom)
    same_weights(module, stock)


@row("Manual optimization")
def test_manual_optimization_by_hand() -> None:
    """Refused, with ``plan_accumulation`` as the way out; written with it, gradients are exact."""

    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            exec(code, {"self": self, "batch": batch, "plan_accumulation": plan_accumulation})

        def loss(self, part: torch.Tensor) -> torch.Tensor:
            self.sizes.append(len(part))
            return loss(self.net, part[:, :-1], part[:, -1:])

    dataset = Samples(37)
    data = DataLoader(torch.cat([dataset.inputs, dataset.targets], dim=1), batch_size=BATCH)
    with pytest.raises(UserError, match=r"automatic_optimization=False.*plan_accumulation") as refused:
        fit(data, AutoAccumulate(), module=Manual())
    code = textwrap.dedent(str(refused.value).partition("\n\n")[2]).replace("…", str(MICRO_BATCH))
    module = Manual()
    module.sizes = []
    fit(data, module=module, max_epochs=1)
    assert module.sizes == [4, 4, 4, 4, 4, 4, 4, 4, 5]
    windows = [list(range(start, min(start + BATCH, 37))) for start in range(0, 37, BATCH)]
    assert worst_error(module.gradients, plain_loop(Samples(37), windows)) <= 1e-12


HELD = {
    "Gradient clipping by norm": "gradient_clipping_by_norm",
    "Gradient clipping by value": "gradient_clipping_by_value",
    "`EMAWeightAveraging`, `WeightAveraging`": "averaging_(exponentially|by_step)",
    "`EarlyStopping`": "early_stopping.*",
    "`ModelCheckpoint(every_n_train_steps=…)`": "checkpoint_every_two_steps",
    "`overfit_batches`": "overfitting_by_(count|fraction)",
    "`fast_dev_run`": "fast_dev_run.*",
    "`limit_train_batches`": "limit_by_(count|fraction)",
    "`max_steps`": "max_steps.*",
    "`val_check_interval`": "validation_(by|over).*",
    "Schedules of the learning rate, `LearningRateMonitor`": "schedule_.*|learning_rates_monitored.*",
    "Loggers, `log_every_n_steps`": "log_every_two_steps",
    "Mixed precision": "precision_.*_mixed",
    "`StochasticWeightAveraging`": "averaging_stochastically",
    "Profilers": "simple_profiler",
    "Progress bars, `on_train_batch_*` hooks, `batch_idx`": "sgd|outputs_read_by_callbacks",
    "`GradientAccumulationScheduler`, `BatchSizeFinder`": "gradient_accumulation_scheduler|batch_size_finder",
}
"""Rows that scenarios hold, with an error of memory too, or that are refused."""


def test_the_table_has_a_row_for_each() -> None:
    """Each name in the first column; a row may hold several."""
    lines = TABLE.read_text(encoding="utf-8").split("\n## ")[0].splitlines()
    rows = [match[1] for line in lines if (match := re.match(r"\| (?!feature|---)(.*?) \|", line))]
    assert sorted(", ".join(rows).split(", ")) == sorted(", ".join(ROWS | HELD.keys()).split(", "))
    survive = {scenario.name for scenario, mode, _ in CASES if mode.fails} | REFUSED.keys()
    assert [row for row, names in HELD.items() if not any(re.fullmatch(names, name) for name in survive)] == []
