"""Small programs whose middle part is computed again: what a forward pass may change, read, draw and return."""

import random
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from lightning_ga.recompute.choice import Candidate

WIDTH = 6
OUTSIDE = torch.Generator().manual_seed(0)
COUNTS = Counter[str]()


class Part(nn.Module):
    """A layer, and what a program does with its values."""

    def __init__(self, change: Callable[["Part", Tensor], Any] = lambda self, x: x, **attributes: Any) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Any:
        if arguments or named:
            return self.change(self, self.layer(x).tanh(), *arguments, **named)
        return self.change(self, self.layer(x).tanh())


class Net(nn.Module):
    """Calls ``part`` between two layers; ``use`` says how."""

    def __init__(self, part: nn.Module, use: Callable[["Net", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.part, self.head = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 3)
        self.use = use or (lambda self, x: self.part(x))
        self.note: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.head(self.use(self, hidden).tanh()).square().mean()


@dataclass
class Pair:
    left: Tensor
    right: Tensor
    parts: list[Tensor]


Named = namedtuple("Named", "left right")


class Running:
    def __init__(self) -> None:
        self.calls, self.seen = 0, []

    def scale(self) -> float:
        self.calls += 1
        self.seen.append(self.calls)
        return 1 / len(self.seen)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def attribute(self: Part, x: Tensor) -> Tensor:
    self.count = getattr(self, "count", 0) + 1
    return self.last(x * self.count)


def buffer_in_place(self: Part, x: Tensor) -> Tensor:
    self.count += 1
    return self.last(x) * self.count.clone()


def buffer_replaced(self: Part, x: Tensor) -> Tensor:
    self.count = 0.9 * self.count + x.detach().mean()
    return self.last(x * self.count)


def data_written(self: Part, x: Tensor) -> Tensor:
    self.count.data.mul_(0.5).add_(x.detach().mean())
    return self.last(x * self.count.clone())


def codebook(self: Part, x: Tensor) -> Tensor:
    nearest = torch.cdist(x.detach(), self.codes).argmin(1)
    chosen = self.codes[nearest]
    if self.training:
        self.codes.data.index_add_(0, nearest, 0.1 * (x.detach() - chosen))
    return self.last(x + (chosen - x).detach()) * x


def listed(self: Part, x: Tensor) -> Tensor:
    self.seen.append(float(x.detach().mean()))
    return self.last(x * len(self.seen))


def in_dictionary(self: Part, x: Tensor) -> Tensor:
    self.state["calls"] = self.state.get("calls", 0) + 1
    self.state.setdefault("inner", []).append(1)
    return self.last(x * (self.state["calls"] + len(self.state["inner"])))


def in_queue(self: Part, x: Tensor) -> Tensor:
    self.queue.append(x.detach().mean())
    return self.last(x * sum(self.queue))


def ordered(self: Part, x: Tensor) -> Tensor:
    self.table.pop(next(iter(self.table)))
    self.table[max(self.table) + 1] = 1
    return self.last(x * next(iter(self.table)))


def lazily(self: Part, x: Tensor) -> Tensor:
    if not hasattr(self, "made"):
        self.made = []
    self.made.append(1)
    return self.last(x * len(self.made))


def later(self: Part, x: Tensor) -> Tensor:
    """Draws random numbers only after the first call, which has drawn none."""
    self.calls = getattr(self, "calls", 0) + 1
    return self.last(F.dropout(x, 0.5) if self.calls > 2 else x)


def later_written(self: Part, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 2:
        self.count.mul_(1.5)
    return self.last(x) * self.count.clone()


def counted_object(self: Part, x: Tensor) -> Tensor:
    return self.last(x * self.running.scale())


def hidden_state(self: Part, x: Tensor) -> Tensor:
    self.hidden = torch.tanh(self.last(x) + self.hidden.detach())
    return self.hidden * x


def penalty(self: Part, x: Tensor) -> Tensor:
    with torch.enable_grad():
        inputs = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.last(inputs).tanh().sum(), inputs, create_graph=True)
    return self.last(x) + gradient.square().mean()


def own_checkpoint(self: Part, x: Tensor) -> Tensor:
    return checkpoint(lambda y: F.dropout(self.last(y).tanh(), 0.3), x, use_reentrant=False) * x


def own_reentrant(self: Part, x: Tensor) -> Tensor:
    return checkpoint(lambda y: self.last(y).tanh(), x, use_reentrant=True) * x


def routed(self: Part, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    mask = x.detach().sum(1) > 0
    out[mask] = self.last(x[mask]).tanh()
    return out * x


def skipped(self: Part, x: Tensor) -> Tensor:
    return x if torch.rand(()).item() < 0.5 else self.last(x).tanh() * x


def teacher(self: Part, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = self.last(x)
    return self.last(x) * (target - x)


def complex_values(self: Part, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(self.last(x)).tanh(), n=WIDTH)


def own_autocast(self: Part, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.last(x).float() * x


def parameter_changed(self: Part, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.last.weight.mul_(0.9)
    return self.last(x)


def large_buffer(self: Part, x: Tensor) -> Tensor:
    self.queue[0] += 1
    return self.last(x) * self.queue[0, 0].clone()


def large_attribute(self: Part, x: Tensor) -> Tensor:
    self.kept[0][0] += 1
    return self.last(x) * float(self.kept[0][0])


def drawn_outside(self: Part, x: Tensor) -> Tensor:
    return self.last(x * torch.rand(WIDTH, generator=OUTSIDE))


def counted_outside(self: Part, x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return self.last(x * COUNTS["calls"])


def dense(net: Net, x: Tensor) -> Tensor:
    features = [x]
    for _ in range(3):
        features.append(net.part(features))
    return sum(features)


def residual(net: Net, x: Tensor) -> Tensor:
    return x + net.part(x) + net.part(2 * x)


def set_by_caller(net: Net, x: Tensor) -> Tensor:
    net.part.scale = 0.5
    x = net.part(x)
    net.part.scale = 2.0
    return net.part(x)


def hooked(net: Net, x: Tensor) -> Tensor:
    handle = net.part.register_forward_hook(lambda module, inputs, output: output * 2)
    try:
        return net.part(x)
    finally:
        handle.remove()


def offloaded(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net.part(x)


def frozen(part: nn.Module) -> nn.Module:
    part.requires_grad_(False)
    return part


def switched(net: Net, x: Tensor) -> Tensor:
    """BatchNorm begins to train with the second step."""
    net.part.train(net.note is not None)
    net.note = True
    return net.part(x)


def linear_then(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH))


def packed(net: Net, x: Tensor) -> Tensor:
    lengths = torch.tensor([4, 2, 2])
    sequences = pack_padded_sequence(x[:12].view(3, 4, WIDTH), lengths, batch_first=True)
    return pad_packed_sequence(net.part(sequences)[0], batch_first=True)[0].flatten(0, 1)


def with_generator(self: Part, x: Tensor, generator: torch.Generator) -> Tensor:
    return self.last(x * torch.rand(WIDTH, generator=generator))


def popping(self: Part, x: Tensor, given: dict[str, Any]) -> Tensor:
    return self.last(x) * given.pop("scale") + given["shift"]


def appending(self: Part, x: Tensor, given: list[Tensor]) -> Tensor:
    given.append(self.last(x))
    return (x * len(given)).tanh()


def scaled(self: Part, x: Tensor) -> Tensor:
    return self.last(x * self.scale).tanh()


class ReadsList(Part):
    def forward(self, features: list[Tensor]) -> Tensor:
        return self.last(self.layer(torch.stack(features).sum(0)).tanh())


class WritesToPair(Part):
    def forward(self, pair: Pair | SimpleNamespace) -> Tensor:
        return self.last(pair.left.mul_(2)).tanh()


class ReadsPair(nn.Linear):
    def forward(self, pair: Pair) -> Tensor:
        return super().forward(pair.left)


class OfPair(Part):
    def forward(self, pair: Pair) -> Pair:
        pair.parts.append(pair.left)
        mixed = self.last(self.layer(pair.left).tanh()) * len(pair.parts)
        return Pair(mixed * pair.right, pair.right, pair.parts)


def drawn_from_pair(self: Part, x: Tensor, pair: SimpleNamespace) -> Tensor:
    return self.last(x * torch.rand(WIDTH, generator=pair.right)) * pair.left


def use_pair(net: Net, x: Tensor) -> Tensor:
    pair = net.part(net.part(Pair(x, 2 * x, [])))
    return pair.left + pair.parts[0]


def use_attention(net: Net, x: Tensor) -> Tensor:
    return net.part(x[None], x[None], x[None], need_weights=False)[0][0]


def use_lstm(net: Net, x: Tensor) -> Tensor:
    return net.part(x[None])[0][0]


def use_generator(net: Net, x: Tensor) -> Tensor:
    net.note = net.note or torch.Generator().manual_seed(1)
    return net.part(net.part(x, net.note), generator=net.note)


def use_generator_in_pair(net: Net, x: Tensor) -> Tensor:
    net.note = net.note or torch.Generator().manual_seed(1)
    return net.part(net.part(x, SimpleNamespace(left=x, right=net.note)), SimpleNamespace(left=x, right=net.note))


def use_popping(net: Net, x: Tensor) -> Tensor:
    return net.part(x, {"scale": 3 * x, "shift": x})


def use_appending(net: Net, x: Tensor) -> Tensor:
    given: list[Tensor] = []
    return net.part(net.part(x, given), given) + sum(given)


def caller_writes(net: Net, x: Tensor) -> Tensor:
    hidden = x.clone()
    out = net.part(hidden)
    return out.clone() + hidden.mul_(2)


def caller_writes_to_pair(net: Net, x: Tensor) -> Tensor:
    hidden = x.clone()
    out = net.part(Pair(hidden, x, []))
    return out.clone() + hidden.mul_(2)


def with_inner(candidate: Candidate) -> Iterator[Candidate]:
    """Yield a submodule of a survey, and all inside it."""
    yield candidate
    for each in candidate.inner:
        yield from with_inner(each)


EXACT: dict[str, Callable[[], Net]] = {
    "layers": lambda: Net(linear_then(nn.GELU())),
    "ReLU in place inside": lambda: Net(linear_then(nn.ReLU(inplace=True))),
    "dropout": lambda: Net(linear_then(nn.Dropout(0.5)), residual),
    "alpha dropout": lambda: Net(linear_then(nn.AlphaDropout(0.5)), residual),
    "torch": lambda: Net(Part(lambda self, x: self.last(x * torch.rand(WIDTH))), residual),
    "Python": lambda: Net(Part(lambda self, x: self.last(x * random.random())), residual),
    "NumPy": lambda: Net(Part(lambda self, x: self.last(x * float(np.random.rand()))), residual),
    "a generator": lambda: Net(
        Part(
            lambda self, x: self.last(x * torch.rand(WIDTH, generator=self.own)), own=torch.Generator().manual_seed(3)
        ),
        residual,
    ),
    "NumPy's generator": lambda: Net(
        Part(lambda self, x: self.last(x * float(self.own.random())), own=np.random.default_rng(3)), residual
    ),
    "Python's generator": lambda: Net(
        Part(lambda self, x: self.last(x * self.own.random()), own=random.Random(3)), residual
    ),
    "a generator as argument": lambda: Net(Part(with_generator), use_generator),
    "a generator in an object as argument": lambda: Net(Part(drawn_from_pair), use_generator_in_pair),
    "random numbers later": lambda: Net(Part(later), residual),
    "a layer left out at random": lambda: Net(Part(skipped), residual),
    "BatchNorm": lambda: Net(linear_then(nn.BatchNorm1d(WIDTH)), residual),
    "BatchNorm, cumulative": lambda: Net(linear_then(nn.BatchNorm1d(WIDTH, momentum=None)), residual),
    "BatchNorm that begins to train": lambda: Net(linear_then(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)), switched),
    "spectral norm": lambda: Net(linear_then(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))), residual),
    "spectral norm by hooks": lambda: Net(linear_then(spectral_norm(nn.Linear(WIDTH, WIDTH)))),
    "weight norm by hooks": lambda: Net(weight_norm(nn.Linear(WIDTH, WIDTH)), residual),
    "weight norm": lambda: Net(linear_then(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))), residual),
    "codebook": lambda: Net(Part(codebook, codes=torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)), residual),
    "attribute": lambda: Net(Part(attribute), residual),
    "attribute set by the caller": lambda: Net(Part(scaled), set_by_caller),
    "buffer in place": lambda: Net(Part(buffer_in_place, count=torch.zeros(())), residual),
    "buffer replaced": lambda: Net(Part(buffer_replaced, count=torch.zeros(())), residual),
    "buffer in place later": lambda: Net(Part(later_written, count=torch.ones(())), residual),
    "buffer by data": lambda: Net(Part(data_written, count=torch.zeros(())), residual),
    "list": lambda: Net(Part(listed, seen=[]), residual),
    "list made in the first call": lambda: Net(Part(lazily), residual),
    "dictionary": lambda: Net(Part(in_dictionary, state={}), residual),
    "queue": lambda: Net(Part(in_queue, queue=deque(maxlen=3)), residual),
    "ordered dictionary": lambda: Net(Part(ordered, table=OrderedDict({1: 1, 2: 1})), residual),
    "object": lambda: Net(Part(counted_object, running=Running()), residual),
    "hidden state": lambda: Net(Part(hidden_state, hidden=torch.zeros(WIDTH)), residual),
    "DenseNet's list": lambda: Net(ReadsList(), dense),
    "dictionary that is emptied": lambda: Net(Part(popping), use_popping),
    "list that is filled": lambda: Net(Part(appending), use_appending),
    "dataclass": lambda: Net(OfPair(), use_pair),
    "named tuple": lambda: Net(
        Part(lambda self, x: Named(self.last(x), x)), lambda net, x: sum(net.part(x)) + net.part(x).left
    ),
    "attention": lambda: Net(nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True), use_attention),
    "LSTM": lambda: Net(nn.LSTM(WIDTH, WIDTH, batch_first=True), use_lstm),
    "packed sequences": lambda: Net(nn.GRU(WIDTH, WIDTH, batch_first=True), packed),
    "own function": lambda: Net(Part(lambda self, x: Square.apply(self.last(x)))),
    "own checkpoint": lambda: Net(Part(own_checkpoint), residual),
    "own checkpoint, reentrant": lambda: Net(Part(own_reentrant), residual),
    "gradient in the forward pass": lambda: Net(Part(penalty), residual),
    "no gradient in part": lambda: Net(Part(teacher), residual),
    "own autocast": lambda: Net(Part(own_autocast), residual),
    "experts": lambda: Net(Part(routed), residual),
    "complex": lambda: Net(Part(complex_values), residual),
    "frozen in the middle": lambda: Net(frozen(Part())),
    "forward hook": lambda: Net(Part(), hooked),
    "saved on the host": lambda: Net(Part(), offloaded),
    "output written to": lambda: Net(linear_then(), lambda net, x: net.part(x).mul_(2).relu_()),
}
"""Programs with the same gradient to the bit."""

REFUSED: dict[str, tuple[Callable[[], Net], str]] = {
    "parameter": (lambda: Net(Part(parameter_changed)), "changes last.weight"),
    "large buffer": (lambda: Net(Part(large_buffer, queue=torch.ones(300, 300))), "changes queue"),
    "large tensor in a list": (
        lambda: Net(Part(large_attribute, kept=[torch.ones(2**17)])),
        "changes a value of type Tensor in its",
    ),
    "large array": (lambda: Net(Part(large_attribute, kept=[np.ones(2**17)])), "changes a value of type ndarray"),
    "generator outside": (lambda: Net(Part(drawn_outside)), "gives another gradient"),
    "counter outside": (lambda: Net(Part(counted_outside)), "gives another gradient"),
    "ReLU in place on its argument": (
        lambda: Net(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), lambda net, x: net.part(2 * x)),
        "its forward pass writes to its arguments",
    ),
    "data class in place": (
        lambda: Net(WritesToPair(), lambda net, x: net.part(Pair(2 * x, x, []))),
        "its forward pass writes to its arguments",
    ),
    "object in place": (
        lambda: Net(WritesToPair(), lambda net, x: net.part(SimpleNamespace(left=2 * x))),
        "its forward pass writes to its arguments",
    ),
    "caller writes to a data class": (lambda: Net(ReadsPair(WIDTH, WIDTH), caller_writes_to_pair), ""),
    "caller writes": (lambda: Net(nn.Linear(WIDTH, WIDTH), caller_writes), ""),  # to its arguments, in place
}
"""Programs that a survey refuses, each with a part of the sentence that is logged; empty if none is."""
