"""The audit: weights of micro-batches in loops that are right or wrong, in this package's own, in scripts."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ddp, on_ranks
from reference import Regression, Samples, fit
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.audit import Audit, audit, main
from lightning_ga.testing import assert_accumulates

FACTOR = 4
RIGHT = "right: mean over samples"
LAST_DIVIDED = "WRONG: last window divided by the factor"


def task(sizes: Any = (4,) * 11) -> tuple[nn.Module, list[Tensor]]:
    """A model with dropout in float32, and its micro-batches."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
    return model, [torch.randn(size, 7, generator=generator) for size in sizes]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch[:, 1:]), batch[:, :1])


def audited(
    divisor: Callable[[int, int], float] = lambda place, window: window,
    *,
    sizes: Any = (4,) * 11,
    before_step: Callable[[nn.Module, Any], object] = lambda model, optimizer: None,
    after_backward: Callable[[int, Any], object] = lambda place, optimizer: None,
    at_epoch: Callable[[Any], object] = lambda optimizer: None,
    steps_on_tail: bool = True,
    zeroes: bool = True,
    **settings: Any,
) -> Audit:
    """A loop of two epochs in which some part is another."""
    model, batches = task(sizes)

    def train() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            at_epoch(optimizer)
            for place, batch in enumerate(batches):
                window = min(FACTOR, len(batches) - place // FACTOR * FACTOR)
                (loss(model, batch) / divisor(place, window)).backward()
                after_backward(place, optimizer)
                if (place + 1) % FACTOR == 0 or (steps_on_tail and place + 1 == len(batches)):
                    before_step(model, optimizer)
                    optimizer.step()
                    if zeroes:
                        optimizer.zero_grad()

    return audit(train, model=model, micro_batches=batches, loss=loss, **settings)


def weights(found: Audit) -> list[list[float]]:
    return [[round(weight, 6) for weight in step.weights] for step in found.steps]


def test_a_right_loop_is_right() -> None:
    """To rounding in float64, although model and data are in float32 and there is dropout."""
    found = audited()
    assert found.is_right
    assert found.verdict == "mean over samples"
    assert weights(found) == 2 * [[0.25] * 4, [0.25] * 4, [0.333333] * 3]
    assert [step.micro_batches for step in found.steps[:3]] == [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11)]
    assert max(step.residual for step in found.steps) < 1e-14


@pytest.mark.parametrize(
    ("verdict", "settings"),
    [
        ("sum", {"divisor": lambda place, window: 1}),
        ("last window divided by the factor", {"divisor": lambda place, window: FACTOR}),
        ("dropped", {"at_epoch": lambda optimizer: optimizer.zero_grad(), "steps_on_tail": False}),
        ("dropped", {"before_step": lambda model, optimizer: optimizer.zero_grad()}),
        ("dropped", {"after_backward": lambda place, optimizer: place % 4 or optimizer.zero_grad()}),
        ("carried over", {"divisor": lambda place, window: FACTOR, "steps_on_tail": False}),
        ("carried over", {"zeroes": False}),
        ("only the last", {"after_backward": lambda place, optimizer: place % 4 == 3 or optimizer.zero_grad()}),
        ("scaled", {"divisor": lambda place, window: window * FACTOR}),
        ("other weights", {"divisor": lambda place, window: 1 + place % FACTOR}),
        ("not a combination", {"before_step": lambda model, _: model[0].weight.grad.mul_(0.1)}),
        ("not a combination", {"before_step": lambda model, _: model[0].weight.grad.add_(model[0].weight)}),
    ],
)
def test_a_wrong_loop_is_found_and_named(verdict: str, settings: dict[str, Any]) -> None:
    found = audited(**settings)
    assert not found.is_right
    assert found.verdict == verdict


def test_unequal_micro_batches_are_weighted_by_samples() -> None:
    """Equal weights are a mean over micro-batches then, unless sizes= says that this is meant."""
    sizes = (4, 2, 4, 4, 3)
    assert audited(sizes=sizes).verdict == "mean over micro-batches"
    total = {0: 14, 4: 3}
    found = audited(lambda place, window: total[place // 4 * 4] / sizes[place], sizes=sizes)
    assert found.is_right
    assert weights(found)[0] == [round(size / 14, 6) for size in sizes[:4]]
    model, batches = task(sizes)
    assert_accumulates(plain(model, batches), model=model, micro_batches=batches, loss=loss, sizes=lambda batch: 1)


def plain(
    model: nn.Module, batches: list[Tensor], divisor: float = 1.0, added: bool = False, window: int = 100
) -> Callable[[], None]:
    """A loop of one epoch, and of one window unless another number of micro-batches is asked for."""

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for start in range(0, len(batches), window):
            part = batches[start : start + window]
            losses = (loss(model, batch) / len(part) / divisor for batch in part)
            for each in [sum(losses)] if added else losses:
                each.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_losses_may_be_added_before_one_backward_pass() -> None:
    model, batches = task()
    found = audit(plain(model, batches, added=True), model=model, micro_batches=batches, loss=loss)
    assert found.is_right
    assert found.steps[0].micro_batches == (*range(1, 12),)


def test_clipping_is_right_and_a_sum_that_is_clipped_is_not() -> None:
    """By norm, where some steps are clipped and others not, and by value."""

    norms = sorted(step.norm for step in audited().steps)
    limit = sum(norms[2:4]) / 2

    def by_norm(model: nn.Module, _: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)

    found = audited(before_step=by_norm)
    assert found.is_right
    assert {step.verdict for step in found.steps} == {"clipped", "mean over samples"}
    assert audited(lambda place, window: 1, before_step=by_norm).verdict == "sum"
    assert audited(before_step=lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1)).is_right


def test_parameters_that_are_scaled_apart_are_named() -> None:
    found = audited(before_step=lambda model, _: model[3].bias.grad.mul_(0.5))
    assert "scaled apart: 3.bias (× 0.5)" in str(found)


def test_the_model_is_put_back() -> None:
    """Its weights to the bit, their type, gradients, modes and dropout; the default type, too."""
    model, batches = task()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    audit(plain(model, batches), model=model, micro_batches=batches, loss=loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[2].p == 0.3
    assert model.training
    assert not model[1].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.get_default_dtype() == torch.float32


class Tracking(nn.Module):
    """A buffer that is another tensor after each pass, a number that counts passes, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.complex = nn.Parameter(torch.randn(6, 16, dtype=torch.complex64))
        self.passes = 0
        self.out = nn.Linear(16, 1)

    def forward(self, batch: Tensor) -> Tensor:
        self.passes += 1
        self.mean = 0.9 * self.mean + 0.1 * batch.mean()
        return self.out((batch.to(torch.complex64) @ self.complex).abs())


def test_gradients_and_tensors_that_were_replaced_are_put_back() -> None:
    model, (_, batches) = Tracking(), task()
    loss(model, batches[0]).backward()
    before = model.mean
    gradient = model.complex.grad
    found = audit(plain(model, batches, window=4), model=model, micro_batches=batches, loss=loss)
    assert found.is_right, str(found)
    assert model.mean is before
    assert model.mean.dtype == torch.float32
    assert model.complex.dtype == torch.complex64
    assert model.complex.grad is gradient
    assert model.passes == 1


@pytest.mark.parametrize("is_named", [True, False])
def test_the_optimizer_gets_what_its_step_is_given(is_named: bool) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any, scale: float) -> Any:
            scales.append(scale)
            with torch.enable_grad():
                closure()
            return super().step()

    scales: list[float] = []
    model, batches = task()

    def train() -> None:
        optimizer = Scaled(model.parameters(), lr=0.01)
        for batch in batches:
            optimizer.zero_grad()

            def closure(batch: Tensor = batch) -> Tensor:
                value = loss(model, batch)
                value.backward()
                return value

            if is_named:
                optimizer.step(closure=closure, scale=0.5)
            else:
                optimizer.step(closure, 0.5)

    assert audit(train, model=model, micro_batches=batches, loss=loss).is_right
    assert scales == [0.5] * len(batches)


def test_layers_and_losses_that_refuse_mixed_types_are_audited() -> None:
    """An LSTM and the binary cross-entropy, with data in float32; BatchNorm is a combination of micro-batches."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm, self.out = nn.LSTM(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

        def forward(self, batch: Tensor) -> Tensor:
            return self.out(self.norm(self.lstm(batch[None])[0][0])).sigmoid()

    model, (_, batches) = Model(), task()
    targets = torch.rand(4, 1, dtype=torch.float32)

    def binary(model: nn.Module, batch: Tensor) -> Tensor:
        return F.binary_cross_entropy(model(batch), targets)

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for place, batch in enumerate(batches[:8], start=1):
            (binary(model, batch) / 4).backward()
            if place % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert_accumulates(train, model=model, micro_batches=batches[:8], loss=binary)


class Plain(nn.Module):
    """Two layers, and what is between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.out, self.between = nn.Linear(6, 16), nn.Linear(16, 1), between

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.between(self.inner(batch)))


def attention(values: Tensor) -> Tensor:
    heads = values.unflatten(1, (4, 4))
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).flatten(1)


@pytest.mark.parametrize("drop", [F.dropout, partial(F.alpha_dropout, training=True), attention])
def test_functions_that_drop_values_drop_none(drop: Callable[[Tensor], Tensor]) -> None:
    model, (_, batches) = Plain(drop), task()
    assert_accumulates(plain(model, batches, window=4), model=model, micro_batches=batches, loss=loss)
    assert not torch.equal(model(batches[0][:, 1:]), model(batches[0][:, 1:]))


def test_layers_may_be_called_by_keyword() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 5), nn.Linear(5, 1)

        def forward(self, batch: Tensor) -> Tensor:
            state = torch.zeros(1, 5)
            return self.out(self.lstm(input=batch, hx=(state, state))[0])

    model, (_, batches) = Model(), task()
    assert_accumulates(plain(model, batches, window=4), model=model, micro_batches=batches, loss=loss)


def test_activations_may_be_computed_again_in_the_backward_pass() -> None:
    """With data in float32, which a layer in float64 refuses."""

    def checkpointed(model: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(checkpoint(model, batch[:, 1:], use_reentrant=False), batch[:, :1])

    model, batches = task()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            checkpointed(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_accumulates(train, model=model, micro_batches=batches, loss=checkpointed)


def test_two_optimizers_of_one_backward_pass_are_one_step() -> None:
    model, batches = task()

    def train() -> None:
        optimizers = [torch.optim.SGD(model[0].parameters()), torch.optim.Adam(model[3].parameters())]
        for batch in batches:
            loss(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    found = audit(train, model=model, micro_batches=batches, loss=loss)
    assert found.is_right
    assert len(found.steps) == 11


def test_more_micro_batches_than_independent_gradients_are_refused() -> None:
    """Numbers of the gradient, or samples that do not differ."""
    batches = [torch.randn(4, 7) for _ in range(3)]
    model = nn.Linear(6, 1, bias=False)
    model.weight.requires_grad_(False)
    small = nn.Sequential(model, nn.Linear(1, 1))
    with pytest.raises(UserError, match="3 micro-batches have 2 independent gradients of 2 numbers"):
        audit(plain(small, batches), model=small, micro_batches=batches, loss=loss)
    model, _ = task()
    same = [batches[0].clone() for _ in range(3)]
    with pytest.raises(UserError, match="3 micro-batches have 1 independent gradients"):
        audit(plain(model, same), model=model, micro_batches=same, loss=loss)


def test_optimizers_within_the_backward_pass_are_refused() -> None:
    """Whether they are of torch.optim, and whether anything steps afterwards."""
    model, batches = task()

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    def train(steps: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hooks = [each.register_post_accumulate_grad_hook(update) for each in model.parameters()]
        for batch in batches:
            loss(model, batch).backward()
            if steps:
                optimizer.step()
        for hook in hooks:
            hook.remove()

    with pytest.raises(UserError, match="No optimizer of torch.optim stepped"):
        audit(lambda: train(steps=False), model=model, micro_batches=batches, loss=loss)
    with pytest.raises(UserError, match="steps within the backward pass cannot be audited"):
        audit(lambda: train(steps=True), model=model, micro_batches=batches, loss=loss)


def test_another_order_of_micro_batches_is_refused() -> None:
    model, batches = task()
    with pytest.raises(UserError, match="but in another order"):
        audit(plain(model, batches, window=4), model=model, micro_batches=batches[::2] + batches[1::2], loss=loss)


def test_an_order_that_changes_is_listed_with_the_same_micro_batches() -> None:
    """A list of two epochs in one order is that of one epoch twice."""
    model, batches = task((4,) * 8)
    for listed in (batches + batches[1::2] + batches[::2], 2 * batches):
        assert_accumulates(plain(model, listed, window=4), model=model, micro_batches=listed, loss=loss)


def test_a_step_without_a_new_gradient_carries_the_last_one_over() -> None:
    model, batches = task()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

    assert audit(train, model=model, micro_batches=batches, loss=loss).verdict == "carried over"


def test_models_that_were_not_named_are_refused() -> None:
    model, batches = task()
    with pytest.raises(UserError, match="The optimizer steps 2 tensors that model= lacks"):
        audit(plain(model, batches), model=nn.Sequential(*model[1:]), micro_batches=batches, loss=loss)


def test_losses_that_are_evaluated_several_times_are_refused() -> None:
    model, batches = task()

    def train() -> None:
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure() -> Tensor:
            value = loss(model, batches[0])
            value.backward()
            return value

        optimizer.step(closure)

    with pytest.raises(UserError, match="LBFGS evaluates its loss several times"):
        audit(train, model=model, micro_batches=batches, loss=loss)
    assert model[0].weight.dtype == torch.get_default_dtype() == torch.float32  # put back after an error, too


def test_the_assertion_shows_the_table() -> None:
    model, batches = task()
    with pytest.raises(AssertionError, match="scaled\nstep"):
        assert_accumulates(plain(model, batches, 2.0), model=model, micro_batches=batches, loss=loss)


def samples_loss(module: Regression, batch: Any) -> Tensor:
    return F.mse_loss(module.net(batch[0]), batch[1])


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("limit", [{}, {"micro_batch_size": 3}])
def test_auto_accumulate_is_right(mode: str, limit: dict[str, int]) -> None:
    """With ragged windows and batches, after a search by trial steps and without; stock Lightning is not."""
    loader = DataLoader(Samples(46, torch.float32), batch_size=4)

    def found(*callbacks: Any, **settings: Any) -> Audit:
        module = Regression(torch.float32)
        return audit(
            lambda: fit(loader, *callbacks, module=module, **settings),
            model=module,
            micro_batches=loader,
            loss=samples_loss,
        )

    ours = found(AutoAccumulate(16, micro_batching=mode, **limit))
    assert ours.is_right, str(ours)
    assert len(ours.steps) == 6
    assert found(accumulate_grad_batches=4).verdict == "mean over micro-batches"


@pytest.mark.parametrize("samples", [42, 14])
def test_without_weights_the_step_adds_as_stock_lightning_does(samples: int) -> None:
    """A recipe's own numbers: equal weights of unequal batches, and the last window divided by the factor."""
    loader = DataLoader(Samples(samples, torch.float32), batch_size=4)

    def found(*callbacks: Any, **settings: Any) -> list[list[float]]:
        module = Regression(torch.float32)
        run = audit(
            lambda: fit(loader, *callbacks, module=module, **settings),
            model=module,
            micro_batches=loader,
            loss=samples_loss,
        )
        return weights(run)

    callback = AutoAccumulate(16, micro_batch_size=4, normalize=None, micro_batching="step")
    assert found(callback) == found(accumulate_grad_batches=4)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_auto_accumulate_is_right_for_counted_items(mode: str) -> None:
    """Under normalize= the loss is a mean over targets that are not ignored."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(22, 3, 5, generator=generator)
    labels = torch.randint(-1, 4, (22, 3), generator=generator)

    class Tokens(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return token_loss(self, batch)

    def token_loss(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module.net(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-1)

    def count(batch: Any) -> float:
        return float((batch[1] != -1).sum())

    module = Tokens(torch.float32)
    module.net[2] = nn.Linear(7, 4)
    loader = DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=2)
    callback = AutoAccumulate(8, micro_batch_size=2, normalize=count, micro_batching=mode)
    assert_accumulates(
        lambda: fit(loader, callback, module=module),
        model=module,
        micro_batches=loader,
        loss=token_loss,
        sizes=count,
    )


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["loader", "step"])
def test_auto_accumulate_is_right_on_two_ranks(mode: str, tmp_path: Path) -> None:
    """Each rank gives the micro-batches of both, and both see the same weights."""
    for found in on_ranks(audit_on_rank, tmp_path, mode):
        assert found.is_right, str(found)
        assert [len(step.weights) for step in found.steps] == [4, 4, 2, 4, 4, 2]


def audit_on_rank(mode: str) -> Audit:
    data = Samples(40, torch.float32)
    module = Regression(torch.float32)
    micro_batches = []
    for start in range(0, 40, 8):  # a rank reads every second sample
        for rank in range(2):
            places = [*range(start + rank, start + 8, 2)]
            micro_batches.append((data.inputs[places], data.targets[places]))
    sampler = DistributedSampler(data, num_replicas=2, rank=int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    callback = AutoAccumulate(16, micro_batching=mode)
    return audit(
        lambda: fit(loader, callback, module=module, use_distributed_sampler=False, **ddp()),
        model=module,
        micro_batches=micro_batches,
        loss=samples_loss,
    )


LIGHTNING = """
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = TensorDataset(torch.randn(int(sys.argv[1]), 8), torch.randn(int(sys.argv[1]), 1))
trainer = pl.Trainer(accumulate_grad_batches=4, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False, max_epochs=1000)
trainer.fit(Model(), DataLoader(data, batch_size=2, shuffle=True))
raise SystemExit("trained to the end")
"""

PLAIN = """
import sys
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))

    def forward(self, inputs, labels=None):
        return {"loss": torch.nn.functional.mse_loss(self.net(inputs), labels)}


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    for _ in range(3):
        (model(torch.randn(4, 8), labels=torch.randn(4, 1))["loss"] / float(sys.argv[1])).backward()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("trained to the end")
"""


@pytest.mark.parametrize(
    ("script", "argument", "code", "printed"),
    [
        (LIGHTNING, "800", 0, RIGHT),
        (LIGHTNING, "804", 1, LAST_DIVIDED),
        (PLAIN, "3", 0, RIGHT),
        (PLAIN, "1", 1, "WRONG: sum"),
    ],
)
def test_a_script_is_audited_as_it_stands(
    script: str, argument: str, code: int, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two short epochs of a Trainer with the same last window, or the first micro-batches of a model with a loss."""
    (tmp_path / "script.py").write_text(script)
    assert main([str(tmp_path / "script.py"), argument]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == printed
    assert any(line.split()[:2] == ["1", "1-4" if script == LIGHTNING else "1-3"] for line in lines)


VALIDATED = """
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):"""
LOADER = "DataLoader(data, batch_size=2, shuffle=True)"
ENDLESS = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8), torch.randn(1)


data ="""
EARLY = "trainer.callbacks.append(pl.callbacks.EarlyStopping('val_loss'))\ntrainer.fit"
OURS = "from lightning_ga import AutoAccumulate\ntrainer.callbacks.append(AutoAccumulate(8, micro_batch_size=2))"
PLATEAU = """return {
            "optimizer": (optimizer := torch.optim.Adam(self.parameters())),
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"
            },
        }"""
VALIDATION = {
    "\n    def configure_optimizers(self):": VALIDATED,
    f"Model(), {LOADER}": f"Model(), {LOADER}, DataLoader(data)",
}


@pytest.mark.parametrize(
    ("edits", "samples", "printed"),
    [
        (VALIDATION | {"trainer.fit": EARLY}, 800, RIGHT),
        (VALIDATION | {"return torch.optim.Adam(self.parameters())": PLATEAU}, 800, RIGHT),
        ({"data =": ENDLESS, LOADER: "DataLoader(Endless(), batch_size=2)"}, 8, RIGHT),
        ({"accumulate_grad_batches=4, ": "", "trainer.fit": f"{OURS}\ntrainer.fit"}, 800, RIGHT),
        ({"max_epochs": 'precision="bf16-true", max_epochs'}, 800, RIGHT),
        ({"loss = torch": "batch[0].mul_(2); loss = torch"}, 800, RIGHT),
        (
            {"loss = torch": "if batch_idx == 1: return None\n        loss = torch"},
            800,
            "WRONG: last window divided by the factor",
        ),
        (
            {"accumulate_grad_batches=4": "accumulate_grad_batches=20", "Dropout(0.5)": "Tanh()"},
            800,
            "right: mean over samples",
        ),
    ],
    ids=["early stopping", "plateau", "endless", "ours", "bf16-true", "in place", "none", "large factor"],
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*returned `None`")
def test_two_short_epochs_suffice(
    edits: dict[str, str], samples: int, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of scripts that validate, never end, measure themselves, leave batches out or change them."""
    script = LIGHTNING
    for old, new in edits.items():
        script = script.replace(old, new)
    (tmp_path / "script.py").write_text(script)
    code = main([str(tmp_path / "script.py"), str(samples)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == printed
    assert code == printed.startswith("WRONG")
    assert int(lines[-2].split()[1].split("-")[-1]) <= 40


@pytest.mark.parametrize(("batches", "last"), [(101, "13"), (102, "13-14"), (103, "13-15")])
def test_the_short_epochs_have_the_same_last_window(
    batches: int, last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(LIGHTNING)
    assert main([str(tmp_path / "script.py"), str(2 * batches)]) == 1
    assert last in capsys.readouterr().out.splitlines()[4].split()


NETWORK = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, inputs, targets):
        return {"loss": torch.nn.functional.mse_loss(self.linear(inputs), targets)}


class Model"""


def test_a_network_that_returns_its_loss_is_audited_by_its_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the micro-batches of the fit, and with its factor."""
    script = LIGHTNING.replace("\nclass Model", NETWORK).replace("self.net = torch", "self.net = Net()  # torch")
    script = script.replace("torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])", 'self.net(*batch)["loss"]')
    (tmp_path / "script.py").write_text(script)
    assert main([str(tmp_path / "script.py"), "804"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "WRONG: last window divided by the factor"
    assert [line.split()[1] for line in lines[1:5]] == ["1-4", "5-8", "9-12", "13-14"]


def test_a_script_may_end_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before as many micro-batches as are audited; without a training its exit code stays."""
    (tmp_path / "script.py").write_text(PLAIN.replace("range(1000)", "range(4)").replace("trained to the end", "done"))
    assert main([str(tmp_path / "script.py"), "1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "WRONG: sum"
    (tmp_path / "script.py").write_text("raise SystemExit(2)")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "script.py")])


def test_a_script_without_a_training_that_can_be_seen_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\ntorch.nn.Linear(1, 1)(torch.ones(1))\n")
    with pytest.raises(UserError, match="trained no LightningModule, and no model whose output has a loss"):
        main([str(tmp_path / "script.py")])
    with pytest.raises(UserError, match=r"none.py is no file: give a script"):
        main([str(tmp_path / "none.py")])
    (tmp_path / "script.py").write_text(
        LIGHTNING.replace("self.net =", "self.automatic_optimization = False; self.net =")
    )
    with pytest.raises(UserError, match="automatic_optimization=False"):
        main([str(tmp_path / "script.py"), "8"])


def test_a_script_leaves_no_hooks_behind(tmp_path: Path) -> None:
    """``torch.compile`` warns of global hooks, and warnings are errors here."""
    (tmp_path / "script.py").write_text(PLAIN)
    assert main([str(tmp_path / "script.py"), "3"]) == 0
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert compiled(torch.ones(3, 2)).shape == (3, 2)
