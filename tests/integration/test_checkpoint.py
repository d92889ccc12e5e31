"""``checkpoint=``: where not one sample fits, submodules are computed again. The oracle has memory enough."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ddp, on_ranks
from reference import FEATURES, Regression, Samples, SaveAll, StreamOf, fit, worst_error
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.testing import limit_memory

WIDTH, ROWS = 48, 60
TOO_LITTLE, PLENTY = "550KiB", "1GiB"  # one sample takes 635 KiB


class Block(nn.Module):
    """Works on 50 rows for each sample, draws random numbers, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.layers(x)


class Deep(Regression):
    """One sample of it has activations of several times the weights."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(FEATURES).double() if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), *(Block() for _ in range(4))).double()
        self.head = nn.Linear(WIDTH, 1).double()
        self.kept: list[Any] = []  # in arrays, which no budget counts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, _ = batch
        inputs = self.norm(inputs)
        rows = inputs[:, None].expand(-1, ROWS, -1) * torch.linspace(0.5, 1.5, ROWS, dtype=inputs.dtype)[:, None]
        hidden = self.net(rows)
        return (self.head(hidden).flatten(1).mean(1) - targets[:, 0]).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.kept.append(np.concatenate([p.grad.cpu().numpy().ravel() for p in self.parameters()]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    @property
    def all_gradients(self) -> list[Tensor]:
        return [*map(torch.from_numpy, self.kept)]


def train_within(
    budget: str | None, *others: Any, data: Any = None, module: Any = None, **given: Any
) -> tuple[Deep, AutoAccumulate]:
    """One epoch within a budget that ends a training that goes beyond it."""
    callback = AutoAccumulate(**{"effective_batch_size": 8, "verify": False, "cache": False, **given})
    module = Deep() if module is None else module
    loader = DataLoader(Samples(24) if data is None else data, batch_size=8)
    with limit_memory(budget or PLENTY), warnings.catch_warnings():
        warnings.simplefilter("error" if budget else "ignore", UserWarning)
        warnings.filterwarnings("ignore", message=".*LeafSpec|.*does not have many workers|.*logging|.*length")
        fit(loader, callback, *others, module=module, max_epochs=1)
    return module, callback


@pytest.fixture(scope="module")
def oracle() -> list[Tensor]:
    return train_within(None)[0].all_gradients


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_what_does_not_fit_trains_with_the_same_gradient(mode: str, oracle: list[Tensor]) -> None:
    """No error comes in training, and the sentence says what it costs."""
    module, callback = train_within(TOO_LITTLE, checkpoint="auto", micro_batching=mode)
    assert worst_error(module.all_gradients, oracle) <= 1e-12
    assert callback.oom_events == 0
    found = callback.probe.recomputed
    assert {name.rpartition(".")[0] for name in found.names} <= {"net", *(f"net.{n}" for n in range(6))}
    assert 0 < found.share < 1
    assert 550 * 1024 <= found.budget_bytes < found.plain_bytes
    assert "of the forward pass; without, 1 sample takes about" in str(found)
    assert not any("forward" in vars(part) for part in module.modules()), "training leaves no trace"
    assert len({float(part.calls) for part in module.modules() if isinstance(part, Block)}) == 1


class Refusing(torch.optim.SGD):
    """Refuses gradients of zeros."""

    def step(self, closure: Any = None) -> Any:
        value = closure()
        if not any(parameter.grad.any() for parameter in self.param_groups[0]["params"]):
            raise RuntimeError("the gradient vanished")
        super().step()
        return value


def test_what_is_computed_again_is_chosen_without_a_step_on_gradients_of_zeros(oracle: list[Tensor]) -> None:
    module = Deep()
    module.configure_optimizers = lambda: Refusing(module.parameters(), lr=module.lr)  # type: ignore[method-assign]
    _, callback = train_within(TOO_LITTLE, checkpoint="auto", module=module)
    assert worst_error(module.all_gradients, oracle) <= 1e-12
    assert callback.probe.recomputed is not None


def test_nothing_is_computed_again_while_one_sample_fits(oracle: list[Tensor]) -> None:
    module, callback = train_within("700KiB", checkpoint="auto")
    assert callback.probe.recomputed is None
    assert worst_error(module.all_gradients, oracle) <= 1e-12


def test_without_it_the_error_names_it_first() -> None:
    with pytest.raises(
        UserError, match='more memory is needed; give checkpoint="auto", which computes activations again'
    ):
        train_within(TOO_LITTLE)


def test_if_no_set_fits_the_error_says_what_is_left() -> None:
    with pytest.raises(UserError, match="computed again that can be, a step takes more than 512,0") as error:
        train_within("500KiB", checkpoint="auto")
    assert "more memory is needed; train in a lower precision, use a smaller model, or shard" in str(error.value)


def test_names_are_always_computed_again(oracle: list[Tensor]) -> None:
    module, callback = train_within(TOO_LITTLE, checkpoint=["net.1", "net.2", "net.3"])
    assert worst_error(module.all_gradients, oracle) <= 1e-12
    assert callback.probe.recomputed is None, "nothing was chosen"
    with pytest.raises(UserError, match=r"checkpoint= names 'net.9', and Deep has no such submodule: it has 'net"):
        train_within(None, checkpoint="net.9")
    with pytest.raises(UserError, match=r"checkpoint= names 'net' and 'net.1', which lies inside it"):
        train_within(None, checkpoint=["net", "net.1"])
    with pytest.raises(UserError, match="checkpoint=3 must be a tuple of names of submodules"):
        AutoAccumulate(checkpoint=3)


def test_the_set_is_remembered_with_the_limit() -> None:
    """One step verifies both; with another budget they are looked for again."""
    first = train_within(TOO_LITTLE, checkpoint="auto", cache=True)[1].probe
    again = train_within(TOO_LITTLE, checkpoint="auto", cache=True)[1].probe
    assert (again.source, again.steps, again.recomputed) == ("cache", 1, first.recomputed)
    plain = train_within("1MiB", checkpoint="auto", cache=True)[1].probe
    assert (plain.source, plain.recomputed) == ("probe", None)


def test_a_resumed_run_goes_on_with_the_set(tmp_path: Path, oracle: list[Tensor]) -> None:
    _, first = train_within(TOO_LITTLE, SaveAll(tmp_path, {1}), checkpoint="auto")
    module = Deep()
    callback = AutoAccumulate(effective_batch_size=8, verify=False, cache=False, checkpoint="auto")
    with limit_memory(TOO_LITTLE):
        loader = DataLoader(Samples(24), batch_size=8)
        fit(loader, callback, module=module, max_epochs=1, ckpt_path=tmp_path / "step1.ckpt")
    assert (callback.probe.source, callback.probe.recomputed) == ("checkpoint", first.probe.recomputed)
    assert worst_error(module.all_gradients, oracle[1:]) <= 1e-12


def test_two_samples_are_the_fewest_where_batchnorm_trains() -> None:
    _, callback = train_within("800KiB", checkpoint="auto", module=Deep(norm=True), batch_norm="ignore")
    assert (callback.probe.limit, callback.probe.recomputed.samples, callback.oom_events) == (2, 2, 0)


class Lengths(Deep):
    """Samples of other numbers of rows: one in so many is a giant."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, lengths = batch
        hidden = self.head(self.net(inputs))[..., 0]
        is_row = torch.arange(inputs.shape[1]) < lengths[:, None]
        return (((hidden * is_row).sum(1) / lengths - targets[:, 0]) ** 2).mean()

    def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Leave out the padding that a piece does not need."""
        parts = zip(*(tensor.split(sizes) for tensor in batch))
        return [(inputs[:, : int(lengths.max())], targets, lengths) for inputs, targets, lengths in parts]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Giants(Dataset):
    """Samples of 6 rows, and every so many one of 20 times as many."""

    def __init__(self, size: int, every: int) -> None:
        self.samples = Samples(size)
        self.every = every

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        rows = 120 if index % self.every == 5 else 6
        inputs, target, _ = self.samples[index]
        return inputs * torch.linspace(0.5, 1.5, rows, dtype=inputs.dtype)[:, None], target, rows


def padded(samples: list[Any]) -> Any:
    inputs, targets, lengths = zip(*samples)
    return pad_sequence(list(inputs), batch_first=True), torch.stack(targets), torch.tensor(lengths)


def train_giants(budget: str, every: int, mode: str, size: int = 64, **given: Any) -> tuple[Lengths, AutoAccumulate]:
    given = {"effective_batch_size": 4, "verify": False, "cache": False, "micro_batching": mode, **given}
    callback = AutoAccumulate(**given)
    data = Giants(size, every)
    is_stream = mode == "step"
    loader = DataLoader(StreamOf(data) if is_stream else data, batch_size=4, collate_fn=padded)
    module = Lengths()
    with limit_memory(budget), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loader, callback, module=module, max_epochs=1)
    module.said = [str(each.message) for each in caught if "Memory ran out" in str(each.message)]
    return module, callback


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_window_with_a_giant_alone_computes_again(mode: str) -> None:
    """Smaller micro-batches come first; the next window is plain, and its micro-batches are as large as before."""
    plain, _ = train_giants("1GiB", 32, mode)
    module, callback = train_giants("850KiB", 32, mode, checkpoint="auto", micro_batch_size=4)
    assert worst_error(module.all_gradients, plain.all_gradients) <= 1e-12
    assert len([each for each in module.said if "run again with submodules computed again" in each]) == 2
    assert callback.oom_events == len(module.said) == 6
    assert callback.plan.micro_batch_size == 4
    assert not any("forward" in vars(part) for part in module.modules())
    with pytest.raises(UserError, match='with one sample alone .*: give checkpoint="auto"'):
        train_giants("850KiB", 32, mode, micro_batch_size=4)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_many_giants_leave_it_so(mode: str) -> None:
    """After the third window of thirty."""
    plain, _ = train_giants("1GiB", 8, mode)
    module, callback = train_giants("850KiB", 8, mode, checkpoint="auto", micro_batch_size=4)
    assert worst_error(module.all_gradients, plain.all_gradients) <= 1e-12
    assert len([each for each in module.said if "run again with submodules computed again" in each]) == 3


def without_giants(size: int, every: int) -> list[Tensor]:
    """A plain loop over windows of four, without their giants."""
    module = Lengths()
    data = Giants(size, every)
    optimizer = module.configure_optimizers()
    for start in range(0, size, 4):
        kept = [data[index] for index in range(start, start + 4) if data[index][2] < 100]
        optimizer.zero_grad()
        module.training_step(padded(kept), 0).backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
    return module.all_gradients


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("checkpoint", [None, "auto"])
def test_what_fits_in_no_way_is_left_out(
    mode: str, checkpoint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is the mean over the others; the list says which sample it was."""
    monkeypatch.chdir(tmp_path)
    given = {"on_oom": "skip", "checkpoint": checkpoint, "micro_batch_size": 2}
    module, _ = train_giants("600KiB", 64, mode, size=68, **given)
    assert worst_error(module.all_gradients, without_giants(68, 64)) <= 1e-12
    assert len(module.all_gradients) == 17
    rows = [line.split(",") for line in (tmp_path / "skipped.csv").read_text().splitlines()]
    assert [name for name, *_ in zip(*rows)] == ["epoch", "window", "place", "index", "size", "rank"]
    assert rows[1][:3] == ["0", "1", "1"]
    assert rows[1][3] == ("5" if mode == "loader" else "")
    assert "120, 5" in ",".join(rows[1])
    train_giants("600KiB", 64, mode, size=68, **given)
    assert len((tmp_path / "skipped.csv").read_text().splitlines()) == 3, "the list goes on"


def test_too_many_that_fit_in_no_way_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="1 samples in a row and 2 of this epoch did not fit and were left out"):
        train_giants("600KiB", 8, "loader", on_oom="skip", micro_batch_size=2)
    with pytest.raises(UserError, match=r"on_oom='skip' leaves samples out of a mean over samples, and whole="):
        AutoAccumulate(on_oom="skip", whole="net")


def of_one_rank() -> list[Any]:
    """The second rank alone has giants."""
    found = []
    for budget in ("1GiB", "1000KiB"):
        module = Lengths()
        callback = AutoAccumulate(verify=False, cache=False, checkpoint="auto", micro_batch_size=2)
        data = Giants(64, 64 if ddp() else 0)
        with limit_memory(budget):
            loader = DataLoader(data, batch_size=2, collate_fn=padded, shuffle=False)
            fit(loader, callback, module=module, max_epochs=1, **ddp())
        found += [module.all_gradients, callback.oom_events]
    return found


@pytest.mark.distributed
def test_one_rank_alone_computes_again(tmp_path: Path) -> None:
    (plain, _, gradients, one), (*_, other) = on_ranks(of_one_rank, tmp_path)
    assert worst_error(gradients, plain) <= 1e-12
    assert min(one, other) == 0 < max(one, other)


def of_small_rank() -> list[Any]:
    """One sample does not fit on the second rank alone."""
    found: list[Any] = []
    for budgets in ((PLENTY, PLENTY), ("2MiB", "700KiB")):
        callback = AutoAccumulate(effective_batch_size=8, verify=False, cache=False, checkpoint="auto", shares="memory")
        module = Deep()
        with limit_memory(budgets[int(os.environ["RANK"])]):
            fit(DataLoader(Samples(24), batch_size=4), callback, module=module, max_epochs=1, **ddp())
        found += [module.all_gradients, callback.probe]
    return found


@pytest.mark.distributed
def test_a_rank_of_little_memory_computes_again_for_a_share_of_its_own(tmp_path: Path) -> None:
    (plain, _, gradients, one), (*_, other) = on_ranks(of_small_rank, tmp_path)
    assert worst_error(gradients, plain) <= 1e-12
    assert one.recomputed is None
    assert other.recomputed is not None
    assert one.limit >= other.limit


class Without(Lengths):
    """Trains on all but giants, of which each micro-batch counts none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_kept = batch[2] < 100
        if not is_kept.any():
            return 0.0 * sum(parameter.sum() for parameter in self.parameters())
        return super().training_step([each[is_kept] for each in batch], batch_idx)


def kept(batch: Any) -> int:
    return int((batch[2] < 100).sum())


def leaving_out() -> list[Any]:
    found = []
    for budget, module, given in (("1GiB", Without(), {"normalize": kept}), ("800KiB", Lengths(), {"on_oom": "skip"})):
        callback = AutoAccumulate(verify=False, cache=False, micro_batch_size=2, **given)
        with limit_memory(budget):
            loader = DataLoader(Giants(64, 64), batch_size=2, collate_fn=padded, shuffle=False)
            fit(loader, callback, module=module, max_epochs=1, default_root_dir="left_out", **ddp())
        found += [module.all_gradients, callback.oom_events]
    return found


@pytest.mark.distributed
def test_ranks_stay_in_step_when_one_leaves_out_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = on_ranks(leaving_out, tmp_path)
    for plain, _, gradients, _ in ranks:
        assert worst_error(gradients, plain) <= 1e-12
    assert sorted(events > 0 for *_, events in ranks) == [False, True]
    (row,) = (tmp_path / "left_out" / "skipped.csv").read_text().splitlines()[1:]
    assert row.split(",")[3] == "5"


def of_rank() -> list[Any]:
    found = []
    for budget in (PLENTY, "700KiB"):  # DDP has buckets
        callback = AutoAccumulate(effective_batch_size=8, verify=False, cache=False, checkpoint="auto")
        module = Deep()
        with limit_memory(budget):
            fit(DataLoader(Samples(24), batch_size=4), callback, module=module, max_epochs=1, **ddp())
        found += [module.all_gradients, callback.probe]
    return found


@pytest.mark.distributed
def test_ranks_choose_together(tmp_path: Path) -> None:
    (plain, _, gradients, one), (*_, other) = on_ranks(of_rank, tmp_path)
    assert one.recomputed.names == other.recomputed.names
    assert worst_error(gradients, plain) <= 1e-12
