"""``find_micro_batch`` on real training steps: the truth is an exhaustive check under ``limit_memory``."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_ga.errors import UserError
from lightning_ga.plan.records import ProbeResult
from lightning_ga.probe.probed_loop import find_micro_batch
from lightning_ga.probe.search import MOST_TRIALS
from lightning_ga.testing import limit_memory

Step = Callable[[int], object]


def plain_loop(
    model: nn.Module,
    inputs: Tensor,
    *,
    loss: Callable[[Tensor], Tensor] = lambda out: out.float().square().mean(),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    precision: torch.dtype | None = None,
) -> Step:
    steps = optimizer(model.parameters(), lr=1e-3)

    def step(samples: int) -> None:
        with torch.autocast("cpu", precision) if precision else nullcontext():
            value = loss(model(inputs[:samples]))
        value.backward()
        steps.step()
        steps.zero_grad()

    return step


def mlp(**options: object) -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    return plain_loop(model, torch.randn(4096, 64), **options)  # type: ignore[arg-type]


def transformer() -> Step:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return plain_loop(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(256, 24, 32))


def contrastive(out: Tensor) -> Tensor:
    """A similarity matrix of b × b."""
    out = F.normalize(out)
    return F.cross_entropy(out @ out.t() / 0.1, torch.arange(len(out)))


class Alone(nn.Module):
    """One sample at a time: the stream's length depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([self.layer(sample).tanh() for sample in inputs])


LOOPS: dict[str, tuple[Callable[[], Step], int, str]] = {
    "mlp": (mlp, 700, "replay"),
    "bf16 autocast": (lambda: mlp(precision=torch.bfloat16), 333, "replay"),
    "transformer": (transformer, 37, "replay"),
    "contrastive": (lambda: mlp(loss=contrastive), 300, "replay"),
    "not aligned": (lambda: plain_loop(Alone(), torch.randn(512, 64)), 77, "phases"),
}


def fits(make: Callable[[], Step], samples: int, budget: int | str) -> int | None:
    """Peak bytes of a steady step; ``None`` if it runs out of the budget."""
    step = make()
    with limit_memory(budget) as memory:
        step(2)
        try:
            step(samples)
        except torch.OutOfMemoryError:
            return None
    return memory.peak_bytes


@pytest.mark.parametrize("name", LOOPS)
def test_the_limit_itself_is_found(name: str) -> None:
    """Budgets: just enough for the limit, and one byte less than one sample more takes."""
    make, limit, method = LOOPS[name]
    enough = fits(make, limit, "1TiB")
    more = fits(make, limit + 1, "1TiB")
    assert enough is not None
    assert more is not None
    assert enough < more
    for budget in (enough, more - 1):
        found = find_micro_batch(make(), high=1000 if limit > 200 else 400, budget=budget, device="cpu")
        assert (found.limit, found.method, found.budget_bytes) == (limit, method, budget)
        assert found.peak_bytes == enough
        assert found.steps == 1 + len(found.trials) <= (5 if method == "replay" else 12)
        assert all(trial.fits for trial in found.trials) or method != "replay"


def tried(found: ProbeResult) -> list[int]:
    return [trial.micro_batch_size for trial in found.trials]


def test_a_cpu_without_a_budget_is_only_predicted() -> None:
    found = find_micro_batch(mlp(), high=4096, device="cpu")
    assert (found.limit, found.method, found.steps, tried(found)) == (4096, "prediction", 3, [4, 8])
    assert found.peak_bytes == fits(mlp, 4096, "1TiB")


def batch_norm() -> Step:
    model = nn.Sequential(nn.Linear(64, 4000), nn.BatchNorm1d(4000), nn.Linear(4000, 1))
    return plain_loop(model, torch.randn(64, 64), optimizer=torch.optim.SGD)


def test_batch_norm_needs_two_samples() -> None:
    """The error names two as the smallest that runs, and following it succeeds; one alone is the user's error."""
    budget = fits(batch_norm, 2, "1TiB")
    assert budget is not None
    assert find_micro_batch(batch_norm(), high=64, budget=budget, device="cpu").limit == 2
    with pytest.raises(UserError, match=r"size=2, the smallest that runs, takes [\d,]+ bytes.*='2.11MiB' is enough"):
        find_micro_batch(batch_norm(), high=64, budget=budget - 1, device="cpu")
    assert find_micro_batch(batch_norm(), high=64, budget="2.11MiB", device="cpu").limit == 2
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        find_micro_batch(batch_norm(), high=1, device="cpu")


@pytest.mark.parametrize("resets", [False, True])
def test_a_state_that_is_half_made_as_memory_runs_out_is_given_to_no_later_step(resets: bool) -> None:
    """Adam makes its state in a step of two samples, which is one too many; the limit is that of one sample alone."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    before = deepcopy(optimizer.state_dict())

    def step(samples: int) -> None:
        inputs = torch.ones(samples, 31_500)
        model(inputs[:, :100]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def reset() -> None:
        optimizer.load_state_dict(before)
        optimizer.zero_grad()

    found = find_micro_batch(step, high=4, budget="395kB", device="cpu", reset=reset if resets else None)
    assert found.limit == 1
    assert not found.trials[0].fits


@pytest.mark.parametrize("budget", [1, "270KiB"])
def test_a_budget_that_no_step_fits_in_says_what_is_enough(budget: int | str) -> None:
    """Whoever follows it can train, and with a hundredth less nobody can."""
    with pytest.raises(UserError, match="micro_batch_size=1, the smallest that runs, takes ") as caught:
        find_micro_batch(mlp(), high=64, budget=budget, device="cpu")
    message = str(caught.value)
    proposed = re.search(r"budget='(\S+)' is enough", message)[1]  # type: ignore[index]
    assert "What usually makes the largest part smaller: " in message
    found = find_micro_batch(mlp(), high=64, budget=proposed, device="cpu")
    assert found.limit >= 1
    with pytest.raises(UserError, match="is enough"):
        find_micro_batch(mlp(), high=64, budget=found.budget_bytes * 98 // 100, device="cpu")


def test_a_budget_that_not_even_the_model_fits_in() -> None:
    """A step that fails for a reason of its own cannot say what is enough."""
    model = nn.Linear(1000, 1000)

    def step(samples: int) -> None:
        raise AssertionError("a bug of the step")

    with pytest.raises(UserError, match=r"optimizer alone take 4,004,000 bytes, .*'1MB' leaves 1,000,000 bytes: more"):
        find_micro_batch(step, high=8, budget="1MB", device="cpu", resident=model.parameters)


def test_other_errors_propagate_after_a_reset() -> None:
    calls: list[str] = []

    def step(samples: int) -> None:
        calls.append(f"step {samples}")
        if samples == 8:
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        find_micro_batch(step, high=64, device="cpu", reset=lambda: calls.append("reset"))
    assert calls == ["step 2", "reset", "step 4", "reset", "step 8", "reset"]


def test_an_ambiguous_error_counts_only_if_a_smaller_size_passed() -> None:
    def engine(limit: int) -> Step:
        def step(samples: int) -> None:
            if samples > limit:
                raise RuntimeError("FIND was unable to find an engine to execute this computation")
            torch.zeros(samples)

        return step

    found = find_micro_batch(engine(20), high=64, budget="1GiB", device="cpu")
    assert found.limit == 20
    assert find_micro_batch(engine(3), high=64, budget="1GiB", device="cpu").limit == 3
    assert find_micro_batch(engine(9), high=64, budget="1GiB", device="cpu", known=found).limit == 9
    with pytest.raises(RuntimeError, match="unable to find an engine"):
        find_micro_batch(engine(0), high=64, budget="1GiB", device="cpu")


def test_resident_tensors_take_their_part_of_the_budget() -> None:
    buffer = torch.zeros(1000)
    budget = fits(mlp, 500, "1TiB")
    assert budget is not None
    found = find_micro_batch(mlp(), high=1000, budget=budget + buffer.nbytes, device="cpu", resident=lambda: [buffer])
    assert (found.limit, found.peak_bytes) == (500, budget + buffer.nbytes)


def test_ranks_run_the_same_sizes_and_find_the_smallest_limit() -> None:
    """One rank has less memory, and another runs out of memory at one size that the meter knows nothing of."""
    budgets, sizes, answers = [40_000, 20_000, 60_000], {0: [], 1: [], 2: []}, [False] * 3
    barrier = threading.Barrier(3, timeout=600)  # seconds; ends what hangs

    def work(rank: int) -> int:
        def agree(value: bool) -> bool:
            answers[rank] = value
            barrier.wait()
            every = all(answers)
            barrier.wait()
            return every

        def step(samples: int) -> None:
            sizes[rank].append(samples)
            if rank == 2 and samples > 30:
                raise torch.OutOfMemoryError("CUDA out of memory")
            torch.zeros(100, samples)

        return find_micro_batch(step, high=90 + rank, budget=budgets[rank], device="cpu", agree=agree).limit

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [30, 30, 30]
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Of a CUDA device of a million bytes that holds nothing."""
    returns = {"allocated.return_value": 0, "handed_out.return_value": 0, "trace.return_value": None}
    fake = Mock(cuts_segments=False, **returns)
    fake.finish.return_value, fake.reserved_peak.return_value = (0, True), 0
    monkeypatch.setattr("lightning_ga.probe.meters.AllocatorMeter", lambda device: fake)
    monkeypatch.setattr("lightning_ga.probe.meters.available_memory", lambda device: 10**6)
    monkeypatch.setattr("lightning_ga.probe.prober.may_reserve", lambda device, size: False)
    return fake


@pytest.mark.usefixtures("meter")
def test_a_step_that_takes_nothing_of_the_device_runs_elsewhere() -> None:
    with pytest.raises(UserError, match="uses no memory on device 'cuda': give find_micro_batch the device="):
        find_micro_batch(lambda samples: torch.zeros(samples), high=64, device="cuda")


def test_an_interrupted_probe_records_no_more(meter: Mock) -> None:
    def step(samples: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_micro_batch(step, high=64, device="cuda")
    meter.stop.assert_called_once_with()


def test_on_cuda_the_statistics_of_the_allocator_decide(meter: Mock) -> None:
    """A step that ran, but only after the allocator emptied its cache, does not fit."""
    sizes: list[int] = []
    meter.finish.side_effect = lambda: (4000 * sizes[-1] + 10_000, 4000 * sizes[-1] < 500_000)
    meter.reserved_peak.side_effect = lambda: 4000 * sizes[-1] + 10_000
    found = find_micro_batch(sizes.append, high=4096, device="cuda")
    assert 0.97 * 124 <= found.limit <= 124
    assert found.limit in sizes
    assert found.peak_bytes == 4000 * found.limit + 10_000
    assert found.steps == len(sizes) <= 1 + MOST_TRIALS


def test_functions_that_are_compiled_as_a_whole_are_recorded_as_they_were_written() -> None:
    """A recorded step runs eagerly, with the limit of the function itself; afterwards it is compiled as before."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        compiled.append(len(examples))
        return graph.forward

    def make(compiles: bool) -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        whole = torch.compile(model, fullgraph=True, backend=backend) if compiles else model
        return plain_loop(whole, torch.randn(512, 64))

    step = make(True)
    found = [find_micro_batch(each, high=512, budget="600KB", device="cpu") for each in (step, make(False))]
    assert found[0].limit == found[1].limit < 512
    assert not compiled
    step(3)
    assert compiled
