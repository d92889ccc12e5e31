"""Features of Lightning whose tests need more than a scenario of tests/differential, which holds the others."""

import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults import Arm, Faults
from lightning.pytorch.callbacks import LearningRateFinder
from reference import Regression, Samples, fit, loss, network, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError, plan_accumulation

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
BATCH, MICRO_BATCH, SIZE = 16, 5, 64


def train_recipe(
    *callbacks: Any, mode: str | None = None, oom: bool = False, module: Any = None, **settings: Any
) -> Any:
    """A fit of the recipe; ``mode``: with the callback; ``oom``: memory runs out in the second step of training."""
    module, data = Regression() if module is None else module, DataLoader(Samples(SIZE), batch_size=BATCH)
    if mode is None:
        return fit(data, *callbacks, module=module, **settings)
    ours = AutoAccumulate(micro_batch_size=MICRO_BATCH, micro_batching=mode, verify=False, batch_norm="ignore")
    faults = Faults(*((70,) if oom else ()))
    with faults:
        result = fit(data, ours, *callbacks, *((Arm(faults),) if oom else ()), module=module, **settings)
    assert ours.oom_events == int(oom)
    return result


def test_the_learning_rate_finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the recipe as it is, and training goes on cut."""
    found = []
    for name, given in (("stock", {}), ("ours", {"mode": "loader"})):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
        module, trainer = train_recipe(finder, enable_checkpointing=True, **given)
        found.append((finder.optimal_lr.suggestion(), module.lr, trainer.global_step))
    assert found[0][:2] == found[1][:2]
    assert found[1][2] == 2 * SIZE // BATCH  # stock Lightning 2.5.0 takes fewer after its finder
    assert max(len(indices) for _, indices in module.micro_batches[10:]) <= MICRO_BATCH


@pytest.mark.parametrize(
    ("what", "mode", "oom"), [("module", "loader", True), ("net", "loader", False), ("module", "step", False)]
)
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

    stock, _ = train_recipe(module=Plain())
    module = Plain()
    if what == "net":
        module.net = torch.compile(module.net, backend="aot_eager")
    train_recipe(module=torch.compile(module, backend="aot_eager") if what == "module" else module, mode=mode, oom=oom)
    torch.testing.assert_close([*module.parameters()], [*stock.parameters()], rtol=1e-10, atol=1e-10)


def test_manual_optimization_by_hand() -> None:
    """Refused, with ``plan_accumulation`` as the remedy; written with it, gradients are exact."""

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
