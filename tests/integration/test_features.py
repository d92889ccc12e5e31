"""Features of Lightning beside ours: each row of docs/concepts/lightning.md, in both modes, also after an OOM.

The oracle is the same Trainer without the callback: one batch of the recipe in one pass. Where a feature has settings,
each of them is tried in both modes, with memory that runs out in one of them: in every pair of values.
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
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from pairing import every_pair
from reference import FEATURES, Regression, Samples, fit, loss, network, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError, plan_accumulation

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
TABLE = Path(__file__).parents[2] / "docs" / "concepts" / "lightning.md"
BATCH, MICRO_BATCH, SIZE = 16, 5, 64
STEPS = SIZE // BATCH  # of the optimizer, in an epoch
ROWS: set[str] = set()
BOTH, MAYBE = ("loader", "step"), {"": False, "oom": True}
MODES = pytest.mark.parametrize("mode", BOTH)
OOM = pytest.mark.parametrize("oom", MAYBE.values(), ids=MAYBE.keys())


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


class Watched(Regression):
    """Validates, and notes after how many steps."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        value = super().training_step(batch, batch_idx)
        self.log("loss", value, on_step=True, on_epoch=True)
        return value

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.global_step)
        self.log("val", loss(self.net, batch[0], batch[1]))

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(8), batch_size=4)


class Normalized(Regression):
    """A BatchNorm layer beside the net: its statistics are gathered, and nothing depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.norm(batch[0])
        return super().training_step(batch, batch_idx)


@row("`EMAWeightAveraging`, `WeightAveraging`")
@row("Gradient clipping by norm", "Gradient clipping by value")
@every_pair(
    what={
        "averages": lambda: ([EMAWeightAveraging(decay=0.9)], {}),
        "norm": lambda: ([], {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"}),
        "value": lambda: ([], {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    },
    mode=BOTH,
    oom=MAYBE,
)
def test_clipping_and_moving_averages(mode: str, oom: bool, what: Any) -> None:
    """Of the gradient of the whole batch, once a step."""
    (callbacks, settings), (others, _) = what(), what()
    stock, _ = train(*callbacks, **settings)
    ours, _ = train(*others, mode=mode, oom=oom, **settings)
    same_weights(ours, stock)


@row("`StochasticWeightAveraging`")
@every_pair(kind=[Regression, Normalized], mode=BOTH, oom=MAYBE)
def test_stochastic_weight_averaging(mode: str, oom: bool, kind: Any) -> None:
    """The same average after as many steps; the pass for BatchNorm sees every sample, without gradients."""
    results = []
    for given in ({}, {"mode": mode, "oom": oom}):
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        results.append(train(averaging, module=kind(), max_epochs=4, **given))
    (stock, stock_trainer), (ours, trainer) = results
    same_weights(ours, stock)
    assert trainer.global_step == stock_trainer.global_step
    assert trainer.current_epoch == stock_trainer.current_epoch
    assert len(sum((indices for _, indices in ours.micro_batches), [])) >= len(
        sum((indices for _, indices in stock.micro_batches), [])
    )
    if kind is Normalized and not oom:  # micro-batches of one size, which weigh the same
        torch.testing.assert_close(ours.norm.running_mean, stock.norm.running_mean, rtol=1e-10, atol=1e-10)


@row("`EarlyStopping`")
@MODES
@OOM
def test_early_stopping(mode: str, oom: bool) -> None:
    """After the same epoch, on the same values."""
    results = []
    for given in ({}, {"mode": mode, "oom": oom}):
        stopping = EarlyStopping("val", patience=1, min_delta=0.05)
        module, trainer = train(stopping, module=Watched(), max_epochs=30, **given)
        results.append(
            (trainer.current_epoch, trainer.global_step, pytest.approx(float(stopping.best_score), rel=1e-6))
        )
    assert results[0] == results[1]
    assert results[0][0] < 30


@row("`ModelCheckpoint(every_n_train_steps=…)`")
@MODES
@OOM
def test_checkpoints(mode: str, oom: bool, tmp_path: Path) -> None:
    """After the same steps of the optimizer, with the same weights."""
    weights = []
    for name, given in (("stock", {}), ("ours", {"mode": mode, "oom": oom})):
        checkpoint = ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        train(checkpoint, enable_checkpointing=True, **given)
        paths = sorted((tmp_path / name).iterdir())
        weights.append({path.name: torch.load(path, weights_only=True)["state_dict"] for path in paths})
    assert weights[0].keys() == {"step=3.ckpt", "step=6.ckpt"}
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-10, atol=1e-10)


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
    assert found[0] == found[1]
    assert max(len(indices) for _, indices in module.micro_batches[30:]) <= MICRO_BATCH


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_memory_that_runs_out_within_the_finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not survived: the finder takes all callbacks out and runs the recipe."""

    class Full(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        train(LearningRateFinder(num_training_steps=20), mode="step", module=Full(), enable_checkpointing=True)


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


@row("Profilers")
@MODES
@OOM
def test_profilers(mode: str, oom: bool) -> None:
    """A step of the optimizer is one; ``run_training_batch`` counts what the loader yields."""
    profiler = SimpleProfiler()
    _, trainer = train(mode=mode, oom=oom, profiler=profiler)
    batches = len(profiler.recorded_durations["run_training_batch"])
    assert trainer.global_step == 2 * STEPS
    assert batches == 2 * STEPS if mode == "step" else batches >= 2 * STEPS * 4
    steps = profiler.recorded_durations["[LightningModule]Regression.optimizer_step"]
    assert len(steps) == 2 * STEPS


@row("`overfit_batches`", "`fast_dev_run`", "`limit_train_batches`", "`max_steps`", "`val_check_interval`")
@every_pair(
    settings=[
        {"overfit_batches": 2},
        {"fast_dev_run": 3},
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.5},
        {"max_steps": 5, "max_epochs": -1},
        {"val_check_interval": 2},
        {"val_check_interval": 0.5},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        {"limit_train_batches": 3, "accumulate_grad_batches": 2},
    ],
    mode=BOTH,
    oom=MAYBE,
)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled (val|training) dataloader shuffling")
def test_modes_of_the_trainer(mode: str, oom: bool, settings: dict[str, Any]) -> None:
    """The samples, windows, steps and validations of the recipe."""
    stock, stock_trainer = train(module=Watched(), **settings)
    ours, trainer = train(module=Watched(), mode=mode, oom=oom, **settings)
    assert trainer.global_step == stock_trainer.global_step
    assert ours.validated == stock.validated
    assert [sorted(set(window)) for window in ours.windows] == [sorted(window) for window in stock.windows]
    if "accumulate_grad_batches" not in settings:  # where stock Lightning is wrong in a ragged window
        same_weights(ours, stock)


@row("Schedules of the learning rate, `LearningRateMonitor`")
@every_pair(interval=["step", "epoch"], frequency=[1, 2, 3], mode=BOTH, oom=MAYBE)
def test_schedules(mode: str, oom: bool, interval: str, frequency: int, tmp_path: Path) -> None:
    """By steps of the optimizer or by epochs, and what the monitor logs."""

    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            config = {"scheduler": schedule, "interval": interval, "frequency": frequency}
            return {"optimizer": optimizer, "lr_scheduler": config}

    rates = []
    for name, given in (("stock", {}), ("ours", {"mode": mode, "oom": oom})):
        logger = CSVLogger(tmp_path, name=name)
        module, trainer = train(
            LearningRateMonitor("epoch"), module=Scheduled(), logger=logger, max_epochs=4, log_every_n_steps=1, **given
        )
        table = (tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines()
        at = table[0].split(",").index("lr-SGD")
        logged = [line.split(",")[at] for line in table[1:] if line.split(",")[at]]
        rates.append((logged, trainer.optimizers[0].param_groups[0]["lr"]))
        assert trainer.lr_scheduler_configs[0].frequency == frequency
    assert rates[0] == rates[1]


@row("Loggers, `log_every_n_steps`")
@MODES
@OOM
def test_loggers(mode: str, oom: bool, tmp_path: Path) -> None:
    """Rows after the same steps of the optimizer; means over an epoch are those over its samples."""
    tables = []
    for name, given in (("stock", {}), ("ours", {"mode": mode, "oom": oom})):
        train(module=Watched(), logger=CSVLogger(tmp_path, name=name), log_every_n_steps=2, **given)
        lines = (tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines()
        records = [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]
        tables.append([record for record in records if not record.get("oom_events")])
    stock, ours = tables
    assert [record["step"] for record in ours] == [record["step"] for record in stock]
    names = ("loss_epoch", "val") if mode == "loader" else ("loss_epoch", "val", "loss_step")
    for name in names:
        values = [[float(record[name]) for record in table if record[name]] for table in tables]
        assert values[1] == pytest.approx(values[0], rel=1e-5)


@row("Progress bars, `on_train_batch_*` hooks, `batch_idx`")
@MODES
@OOM
def test_what_a_batch_is(mode: str, oom: bool) -> None:
    """For bars and hooks: a micro-batch, or a batch of the recipe."""

    class Bar(TQDMProgressBar):
        def __init__(self) -> None:
            super().__init__(refresh_rate=0)
            self.totals: list[Any] = []
            self.seen: list[int] = []

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            self.totals.append(self.total_train_batches)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch_idx)

        def on_train_epoch_end(self, *_: Any) -> None:
            pass

    bar = Bar()
    train(bar, mode=mode, oom=oom, enable_progress_bar=True)
    each = 1 if mode == "step" else 4
    assert bar.totals[0] == each * STEPS
    assert bar.seen[: bar.totals[0]] == list(range(each * STEPS))
    if mode == "step":
        assert bar.totals == [STEPS, STEPS]


@row("Mixed precision")
@every_pair(precision=["16-mixed", "bf16-mixed"], mode=BOTH, oom=MAYBE)
def test_precision(mode: str, oom: bool, precision: str) -> None:
    """Within the rounding of a batch; the scaler moves once a step."""
    weights, scales = [], []
    for given in ({}, {"mode": mode, "oom": oom}):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        extra = {"plugins": plugin} if precision == "16-mixed" else {"precision": precision}
        data = DataLoader(Samples(SIZE, torch.float32), batch_size=BATCH)
        module, _ = train(module=Regression(dtype=torch.float32), data=data, **extra, **given)
        weights.append(list(module.parameters()))
        scales.append(scaler.get_scale())
    torch.testing.assert_close(weights[1], weights[0], rtol=5e-2, atol=5e-3)
    assert scales[0] == scales[1]


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


@row("`GradientAccumulationScheduler`, `BatchSizeFinder`")
@MODES
def test_rivals(mode: str) -> None:
    """Refused by name: they set the same things."""
    rival = pl.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(UserError, match="AutoAccumulate and GradientAccumulationScheduler, which set the same things"):
        train(rival, mode=mode)


def test_the_table_has_a_row_for_each() -> None:
    """And no row that is not tested here."""
    lines = TABLE.read_text(encoding="utf-8").split("\n## ")[0].splitlines()
    rows = {match[1].strip() for line in lines if (match := re.match(r"\| (?!feature|---)(.*?) \|", line))}
    assert rows == ROWS
