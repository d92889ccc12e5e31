"""Gradients of windows that fail on some ranks, in random places, are those of windows that do not: real gloo ranks."""

import datetime
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Faults
from forks import forked, in_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat import ranks
from lightning_ga.compat.gradient_dtype import float32_allowed, has_grad_dtype, widen
from lightning_ga.compat.reduction import ALREADY_SENT, Exchange

WINDOWS, BATCH = 5, 8
OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
HANGS = datetime.timedelta(minutes=5)  # in which every collective ends, or the test fails


def fail(*_: Any) -> None:
    Net.fails = None
    raise torch.OutOfMemoryError("CUDA out of memory.")


def has_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None


class Net(nn.Module):
    """Layers, of which some ranks leave one out; ``fails`` says where its next pass raises."""

    fails: tuple[str, int] | None = None

    def __init__(self, case: "Case") -> None:
        super().__init__()
        widths = case.widths
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.side = nn.Linear(widths[0], widths[-1]) if case.unused else None
        self.never = nn.Linear(3, 3) if case.unused == 2 else None
        self.table = nn.Embedding(11, widths[0], sparse=True) if case.is_sparse else None
        if case.has_buffers:
            self.register_buffer("scale", torch.ones(3))
            self.register_buffer("seen", torch.zeros(1))
        if case.has_hooks:  # which meet gradients only
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: gradient * 0.5)
                parameter.register_post_accumulate_grad_hook(has_gradient)

    def forward(self, inputs: Tensor, use_side: bool) -> Tensor:
        kind, place = Net.fails or ("", 0)
        inputs = inputs.clone().requires_grad_()
        hidden = start = inputs * 1
        if kind == "after":
            inputs.register_hook(fail)
        if self.table is not None:
            hidden = start = start + self.table((inputs.detach()[:, 0].abs() * 3).long() % 11)
        for index, layer in enumerate(self.layers):
            if (kind, place) == ("forward", index):
                fail()
            hidden = torch.tanh(layer(hidden))
            if (kind, place) == ("backward", index):
                hidden.register_hook(fail)
        if "scale" in self._buffers:
            hidden = hidden * self.scale.mean()
            self.seen += inputs.detach().sum()
        return hidden + self.side(start) if self.side is not None and use_side else hidden


@dataclass
class Case:
    """A training, and where its windows fail: by window and rank, places of one attempt after the other."""

    seed: int
    widths: list[int]
    options: dict[str, Any]
    batches: int = 1
    unused: int = 0
    uses: list[list[int]] = field(default_factory=lambda: [[1] * 4] * WINDOWS)
    has_buffers: bool = False
    has_hooks: bool = False
    is_sparse: bool = False
    keeps_memory: bool = False  # of gradients that are zeroed
    comm_hook: bool = False  # of the user's own
    dtype: torch.dtype = torch.float64
    fails: dict[tuple[int, int], list[tuple[bool, str, int]]] = field(default_factory=dict)


def random_case(seed: int, size: int) -> Case:
    draw = random.Random(seed)
    layers = draw.randint(3, 6)
    options: dict[str, Any] = {"bucket_cap_mb": draw.choice([0.0005, 0.001, 0.003])}
    kind = draw.choice(["plain", "plain", "unused", "view", "unused view", "sparse", "static", "comm_hook"])
    if "unused" in kind:
        options["find_unused_parameters"] = True
    if "view" in kind:
        options["gradient_as_bucket_view"] = True
    if kind == "static":
        options["static_graph"] = True
    case = Case(
        seed,
        [draw.choice([5, 9, 16, 33, 64]) for _ in range(layers + 1)],
        options,
        batches=4 if kind == "comm_hook" else draw.choice([1, 2, 4]),
        unused=draw.choice([0, 1, 2]) if "unused" in kind else 0,
        has_buffers=draw.random() < 0.5,
        has_hooks=draw.random() < 0.3 and kind != "sparse",
        is_sparse=kind == "sparse",
        keeps_memory=draw.random() < 0.3,
        comm_hook=kind == "comm_hook",
    )
    if case.unused:
        case.uses = [[draw.randint(0, 1) for _ in range(size)] for _ in range(WINDOWS)]

    def place() -> tuple[bool, str, int]:
        in_last = draw.random() < 0.8 and kind != "comm_hook"
        at, layer = draw.random(), draw.randrange(layers)
        if at < 0.1:
            return in_last, "after", 0
        if at < 0.2 and kind not in ("comm_hook", "static"):
            return in_last, "update", 0
        if at < 0.35:
            return in_last, "forward", layer
        return in_last, "backward", draw.choice([0, layers - 1, layer])  # 0 is before the last bucket

    who = draw.choice(["one", "one", "all", "many"])
    window, rank = draw.randrange(WINDOWS) if draw.random() < 0.7 else 0, draw.randrange(size)
    for each in range(WINDOWS):
        for one in range(size):
            fails = draw.random() < 0.5 if who == "many" else each == window and (one == rank or who == "all")
            if fails:
                case.fails[each, one] = [place() for _ in range(draw.choice([1, 1, 2]))]
    return case


@dataclass
class Result:
    weights: Tensor
    missing: list[bool]  # gradients
    failed: int = 0
    sent: set[str] = field(default_factory=set)
    operations: int = 0  # of the last pass


def train_case(case: Case, windows: Callable[..., Iterator[Any]], *, stock: bool) -> Result:
    """Train for some windows, each of a number of batches."""
    torch.manual_seed(case.seed)
    rank, net = dist.get_rank(), Net(case).to(case.dtype)
    options = {name: value for name, value in case.options.items() if not (stock and name == "static_graph")}
    ddp = DistributedDataParallel(net, **options)
    if case.comm_hook and not stock:
        ddp.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(1000 * case.seed + rank)
    result = Result(torch.empty(0), [])
    exchange = None if stock else Exchange(ddp)
    for window in range(WINDOWS):
        if case.has_buffers:
            net.scale.copy_(1 + 0.1 * torch.sin(net.seen + rank))
        sizes = BATCH, case.widths[0], BATCH, case.widths[-1]
        batches = [
            (
                torch.randn(*sizes[:2], generator=draw, dtype=case.dtype),
                torch.randn(*sizes[2:], generator=draw, dtype=case.dtype),
            )
            for _ in range(case.batches)
        ]
        windows(case, ddp, optimizer, batches, window, exchange, result)
        optimizer.step()
    result.weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    result.missing = [p.grad is None for p in net.parameters()]
    return result


def run_pass(case: Case, ddp: Any, optimizer: Any, inputs: Tensor, targets: Tensor, window: int, first: bool) -> None:
    use_side = bool(case.uses[window][dist.get_rank()])
    loss = ((ddp(inputs, use_side) - targets) ** 2).sum() / (BATCH * case.batches)
    if first:
        optimizer.zero_grad(set_to_none=not case.keeps_memory)
    loss.backward()


def stock_window(case: Case, ddp: Any, optimizer: Any, batches: Any, window: int, *_: Any) -> None:
    for index, (inputs, targets) in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else ddp.no_sync():
            run_pass(case, ddp, optimizer, inputs, targets, window, index == 0)


def survived_window(
    case: Case, ddp: Any, optimizer: Any, batches: Any, window: int, exchange: Any, result: Result
) -> None:
    """As the loop does it: from its start again in smaller pieces after each error."""
    fails, parts, net = [*case.fails.get((window, dist.get_rank()), [])], 1, ddp.module
    while True:
        exchange.begin_window()
        buffers = [buffer.clone() for buffer in net.buffers()]
        in_last, kind, place = fails.pop(0) if fails else (True, "", 0)
        begun, is_planned = ranks.collectives_run(), bool(kind)
        try:
            pieces = [pair for x, y in batches for pair in zip(x.chunk(parts), y.chunk(parts))]
            for index, (inputs, targets) in enumerate(pieces):
                last = index == len(pieces) - 1
                fails_here = last if in_last else index == 0
                Net.fails = (kind, place) if kind in ("forward", "backward", "after") and fails_here else None
                faults = Faults(place) if kind == "operation" and fails_here else Faults()
                faults.armed = True
                with exchange.pass_(last=last), faults:
                    run_pass(case, ddp, optimizer, inputs, targets, window, index == 0)
                result.operations = faults.count
            exchange.finish()
            if kind == "update":
                fail()
        except torch.OutOfMemoryError:
            if not is_planned:
                raise
            result.failed += 1
        else:
            assert ranks.collectives_run() == begun, case
            return
        assert ranks.collectives_run() == begun, case
        result.sent.add("some" if exchange._noting._sent else "none")
        assert (why := exchange.failed()) is None, why
        for buffer, before in zip(net.buffers(), buffers):
            buffer.copy_(before)
        parts *= 2


def join() -> None:
    """Become one of the ranks, which share gloo's group."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2000
    dist.init_process_group("gloo", timeout=HANGS)


def random_cases(first: int, count: int) -> None:
    """Windows that fail give the gradients of those that do not, on every rank, whatever has been sent."""
    join()
    sent: set[str] = set()
    for seed in range(first, first + count):
        case = random_case(seed, dist.get_world_size())
        expected, result = train_case(case, stock_window, stock=True), train_case(case, survived_window, stock=False)
        sent |= result.sent
        error = float((expected.weights - result.weights).abs().max())
        others = [torch.empty_like(result.weights) for _ in range(dist.get_world_size())]
        dist.all_gather(others, result.weights)
        assert error < 1e-12, (error, case)
        assert all(torch.equal(others[0], other) for other in others), case
        assert case.keeps_memory or expected.missing == result.missing, case
    print("sent", sorted(sent))
    dist.destroy_process_group()


def every_operation(options: dict[str, Any]) -> None:
    """Memory runs out on one rank after the other at every second operation of a window's last pass, or fewer.

    Operations with which the reducer fills its buckets are among them.
    """
    join()
    case = Case(5, [4, 8, 3], {"bucket_cap_mb": 1e-6, **options}, batches=2, has_buffers=True)
    expected, clean = train_case(case, stock_window, stock=True), train_case(case, survived_window, stock=False)
    failed, places = 0, range(1, clean.operations + 1, 4 if options else 2)
    for number, place in enumerate(places):
        case.fails = {(number % 3, number % 2): [(True, "operation", place)]}  # in the first three windows
        result = train_case(case, survived_window, stock=False)
        failed += result.failed
        assert float((expected.weights - result.weights).abs().max()) < 1e-12, place
    assert failed > len(places) // 2 - 5  # some windows have a few operations less
    dist.destroy_process_group()


def sums_of_half_precision() -> None:
    """They are averaged in single precision; one weight only rank 1 uses, one nobody does: that gets no gradient."""
    join()
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = nn.ModuleDict({name: nn.Linear(5, 5) for name in ("used", "side", "never")}).bfloat16()
    table = net["table"] = nn.Embedding(4, 5, sparse=True)
    ddp = DistributedDataParallel(net)
    exchange = Exchange(ddp)
    assert exchange.by_hand
    parameters = [*net.parameters()]
    allowed = float32_allowed(parameters)
    allowed.__enter__()
    exchange.begin_window()
    local = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
    for number in range(2):
        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * rank + number)).bfloat16()
        with exchange.pass_(last=number == 1):
            output = net["used"](inputs) + (net["side"](inputs) if rank else 0) + table(torch.tensor([rank])).bfloat16()
            gradients = torch.autograd.grad(output.square().sum(), parameters, allow_unused=True, retain_graph=True)
            output.square().sum().backward()
        widen(parameters)
        for parameter, gradient in zip(parameters, gradients):
            local[parameter] += 0 if gradient is None else gradient.to_dense()
    exchange.finish()
    for name, parameter in net.named_parameters():
        dist.all_reduce(local[parameter])
        if name.startswith("never"):
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        assert parameter.grad.is_sparse == (name == "table.weight")
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad.to_dense(), local[parameter] / 2, rtol=1e-6, atol=1e-6)
    assert exchange.failed() == ALREADY_SENT
    allowed.__exit__(None, None, None)
    dist.destroy_process_group()


def refused() -> None:
    """On one rank: an error in the exchange that cannot be taken up."""
    join()
    for options, with_hook, place, sentence in (
        ({"find_unused_parameters": True}, False, ("after", 0), None),
        ({}, True, ("backward", 0), ALREADY_SENT),
        ({}, True, ("forward", 0), ALREADY_SENT),
        ({}, False, ("after", 0), None),
    ):
        case = Case(3, [4, 4, 4], options, comm_hook=with_hook)
        ddp = DistributedDataParallel(Net(case).double(), **options)
        exchange = Exchange(ddp)
        if with_hook:  # when an exchange is there
            ddp.register_comm_hook(None, allreduce_hook)
        exchange.begin_window()
        Net.fails = place
        with pytest.raises(torch.OutOfMemoryError), exchange.pass_(last=True):
            ddp(torch.ones(2, 4, dtype=torch.float64), True).sum().backward()
        assert exchange.failed() == sentence
    exchange = Exchange(DistributedDataParallel(nn.Linear(2, 2)), "it shards the model")
    exchange.begin_window()
    assert exchange.failed() == "it shards the model"
    dist.destroy_process_group()


def private_names() -> None:
    """What is relied on of torch's private parts: an upgrade that changes it fails here, by name."""
    join()
    ddp, static = (DistributedDataParallel(nn.BatchNorm1d(2), static_graph=is_static) for is_static in (False, True))
    assert hasattr(static, "_static_graph_delay_allreduce_enqueued")
    attributes = {"static_graph", "find_unused_parameters", "require_forward_param_sync"}
    attributes |= {"_comm_hooks", "_module_parameters", "_sync_buffers", "will_sync_module_buffers", "mixed_precision"}
    attributes |= {"_use_python_reducer", "skip_all_reduce_unused_params"}
    assert [name for name in attributes if not hasattr(ddp, name)] == []
    assert ddp.will_sync_module_buffers()
    assert hasattr(ddp.reducer, "_reset_state")
    assert hasattr(ddp.reducer, "_update_process_group")
    before = ranks.collectives_run()
    dist.all_reduce(torch.ones(1))
    ddp._sync_buffers()
    assert ranks.collectives_run() == before + 3  # with buffers of two types
    with ranks.in_single_group():
        dist.all_reduce(torch.ones(1))
    for _ in range(2):
        ddp(torch.ones(3, 2)).sum().backward()
    exchange = Exchange(ddp)
    exchange.begin_window()
    group, kept = weakref.ref(exchange._noting), weakref.ref(ddp.module)
    del exchange
    gc.collect()
    ddp(torch.ones(3, 2)).sum().backward()  # through the group, which the reducer needs as long as it lives
    del ddp
    gc.collect()
    assert group() is None
    assert kept() is None
    dist.destroy_process_group()


ON_RANKS: dict[str, tuple[int, Callable[..., None], tuple[Any, ...]]] = {
    "1 rank": (1, random_cases, (10, 3)),
    "2 ranks": (2, random_cases, (0, 8)),
    "3 ranks": (3, random_cases, (1000, 3)),
    "2 ranks, many": (2, random_cases, (2000, 24)),
    "3 ranks, many": (3, random_cases, (3000, 12)),
    **{f"any operation, {options}": (2, every_operation, (options,)) for options in OPTIONS},
    "half precision": (2, sums_of_half_precision, ()),
    "refused": (1, refused, ()),
    "private names": (1, private_names, ()),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "many" in name else ()) for name in ON_RANKS]
)
def test_an_exchange_is_that_of_windows_without_errors(name: str, tmp_path: Path) -> None:
    if name == "half precision" and not has_grad_dtype():
        pytest.skip("gradients have the types of their parameters before torch 2.10")
    size, function, arguments = ON_RANKS[name]
    done = forked(in_ranks, size, function, *arguments, folder=tmp_path)
    assert done.code == 0, done.output
    if function is random_cases:  # errors came before the first exchange and after it
        assert all(kind in done.output for kind in ["some", "none"][size == 1 :])
