"""Each thing that a training step may change is put back, bit for bit and as the same object."""

import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.state import Attributes, OptimizerState, SwappedState, TensorValues


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return iter([*module.parameters(), *module.buffers()])


def trial(module: nn.Module, change: Callable[[Any], None], shared: tuple[object, ...] = ()) -> None:
    """Change a module as a probe does: on copies of its plain state, twice; then put everything back."""
    values, plain = TensorValues(own_tensors(module)), SwappedState(list(module.modules()), list(shared))
    for _ in range(2):
        plain.restore()
        values.restore()
        plain.swap_in_copies()
        change(module)
    plain.restore()
    values.restore()


# --- tensors -----------------------------------------------------------------------------------


def test_tensors_are_restored_in_place_and_bit_for_bit() -> None:
    """NaN, -0.0 and denormal numbers too; parameters stay the same objects in the same memory."""
    values = torch.tensor([1.0, float("nan"), -0.0, 1e-45, float("inf")])
    tensor, whole, half = values.clone(), torch.arange(3), values.to(torch.bfloat16)
    kept = TensorValues(iter([tensor, whole, half]))
    place, bits = tensor.data_ptr(), tensor.view(torch.int32).clone()
    for one in (tensor, whole, half):
        one.zero_()
    kept.restore()
    assert tensor.data_ptr() == place
    assert torch.equal(tensor.view(torch.int32), bits)
    assert torch.equal(whole, torch.arange(3))
    assert torch.equal(half.view(torch.int16), values.to(torch.bfloat16).view(torch.int16))


def test_parameters_want_gradients_again_exactly_if_they_did() -> None:
    """A step may freeze or thaw them; writing a value back leaves no trace in autograd."""
    frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    kept = TensorValues(iter([frozen, trained]))
    frozen.requires_grad_(True)
    trained.requires_grad_(False)
    kept.restore()
    assert (frozen.requires_grad, trained.requires_grad) == (False, True)
    assert trained.is_leaf
    assert trained.grad_fn is None


# --- plain state of modules --------------------------------------------------------------------


class Eventful(nn.Module):
    """Holds whatever modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.register_buffer("ema", torch.zeros(2))
        self.count = 0
        self.history: list[Any] = [1]
        self.nested = {"losses": [torch.tensor(1.0)], "best": {"loss": 2.0}}
        self.seen = {1, 2}
        self.array = np.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.python_generator = random.Random(3)
        self.cached = torch.ones(2)
        self.alias = [self.net[0].weight]
        self.lock = threading.Lock()
        self.data = DataLoader(TensorDataset(torch.zeros(4)))


def everything(module: Eventful) -> list[Any]:
    """All values, as plain data that can be compared."""
    return [
        module.count,
        list(module.history),
        copy.deepcopy(module.nested),
        set(module.seen),
        module.array.tolist(),
        module.generator.get_state().tolist(),
        module.numpy_generator.bit_generator.state,
        module.python_generator.getstate(),
        module.cached.tolist(),
        module.training,
        [tensor.tolist() for tensor in own_tensors(module)],
    ]


def disturb(module: Eventful) -> None:
    module.net(torch.randn(4, 2))
    module.count += 1
    module.history.append(2)
    module.nested["losses"].append(torch.tensor(3.0))  # type: ignore[attr-defined]
    module.nested["losses"][0].add_(1)  # type: ignore[index]
    module.nested["best"]["loss"] = 0.0  # type: ignore[index]
    module.seen.add(9)
    module.array += 1
    torch.rand(3, generator=module.generator)
    module.numpy_generator.random(3)
    module.python_generator.random()
    module.cached.add_(1)
    module.eval()
    module.ema.add_(1)
    module.newcomer = 7
    module.net[0].newcomer = 8  # type: ignore[assignment]
    del module.net[1].momentum
    module.net[1].momentum_ = 0.5  # type: ignore[assignment]
    with torch.no_grad():
        module.net[0].weight.mul_(2)


def test_whatever_a_step_does_to_a_module_is_undone() -> None:
    """Counters, containers within containers, arrays, generators, cached tensors, mode, new and deleted attributes."""
    module = Eventful()
    before, objects, names = everything(module), dict(vars(module)), set(vars(module.net[0]))
    first = vars(module)["nested"]["losses"][0]
    trial(module, disturb)
    assert everything(module) == before
    assert vars(module).keys() == objects.keys()
    assert all(vars(module)[name] is value for name, value in objects.items())
    assert module.nested["losses"][0] is first  # type: ignore[index]
    assert set(vars(module.net[0])) == names
    assert module.net[1].momentum == 0.1
    assert not hasattr(module.net[1], "momentum_")


def test_every_trial_starts_from_the_same_state() -> None:
    """A second trial sees nothing of the first, or growing state would be read as memory that grows."""
    module, seen = Eventful(), []

    def change(module: Eventful) -> None:
        seen.append(everything(module))
        disturb(module)

    trial(module, change)
    assert len(seen) == 2
    assert seen[0] == seen[1] == everything(module)


def test_a_copy_refers_to_the_same_tensors_and_modules() -> None:
    """An alias of a parameter, a child or a shared object is not torn from it while a trial runs."""
    module, trainer = Eventful(), object()
    module.holder = {"trainer": trainer, "child": [module.net[0]]}  # type: ignore[assignment]
    weight, child, data = module.net[0].weight, module.net[0], module.data

    def change(module: Eventful) -> None:
        assert module.alias[0] is weight
        assert module.net[0] is child
        assert module.holder["trainer"] is trainer  # type: ignore[index]
        assert module.holder["child"][0] is child  # type: ignore[index]
        assert module.data is data

    trial(module, change, shared=(trainer,))


def test_what_refers_to_one_object_twice_still_does_in_a_trial() -> None:
    """Two attributes, of two modules even, that are one list."""
    module = Eventful()
    module.same = module.history  # type: ignore[assignment]
    module.net[0].same = module.history  # type: ignore[assignment]

    def change(module: Eventful) -> None:
        module.history.append(5)
        assert module.same is module.history is module.net[0].same

    trial(module, change)
    assert module.history == [1]


def test_a_list_of_losses_with_their_graph_does_not_grow() -> None:
    """Tensors that hang on a graph cannot be copied; the list that holds them is, all the same."""
    module = Eventful()
    loss = (module.net[0].weight * 2).sum()
    outputs, inner = {"losses": [loss]}, [loss]
    outputs["losses"] = inner
    module.outputs = outputs  # type: ignore[assignment]
    module.inner = inner  # type: ignore[assignment]
    module.last = loss

    def change(module: Eventful) -> None:
        module.outputs["losses"].append(loss)  # type: ignore[index]
        assert module.inner is module.outputs["losses"]  # type: ignore[index]
        assert len(module.inner) == 2
        module.outputs["more"] = []  # type: ignore[index]

    trial(module, change)
    assert module.outputs is outputs
    assert outputs == {"losses": inner}
    assert len(inner) == 1
    assert inner[0] is loss


def test_a_parameter_or_buffer_that_is_replaced_comes_back() -> None:
    """The very tensor, not its value in another one; added ones go."""
    module = Eventful()
    weight, ema = module.net[0].weight, module.ema

    def change(module: Eventful) -> None:
        module.net[0].weight = nn.Parameter(torch.zeros(3, 2))  # type: ignore[assignment]
        module.ema = torch.full((2,), 5.0)
        module.register_buffer("newcomer", torch.zeros(1))
        module.register_parameter("other", nn.Parameter(torch.zeros(1)))

    trial(module, change)
    assert module.net[0].weight is weight
    assert module.ema is ema
    assert [name for name, _ in module.named_buffers(recurse=False)] == ["ema"]
    assert list(dict(module.named_parameters(recurse=False))) == []


def test_an_lstm_works_on_its_own_weights_during_and_after() -> None:
    """cuDNN's flat list of weights holds the parameters themselves, in a trial too."""
    lstm = nn.LSTM(3, 4, num_layers=2)
    inputs = torch.randn(5, 2, 3)
    before, expected = list(lstm._flat_weights), lstm(inputs)[0].detach().clone()

    def change(lstm: nn.LSTM) -> None:
        assert all(flat is parameter for flat, parameter in zip(lstm._flat_weights, lstm.parameters()))
        lstm(inputs)[0].sum().backward()
        torch.optim.SGD(lstm.parameters(), lr=1.0).step()
        lstm.flatten_parameters()

    trial(lstm, change)
    assert all(now is then for now, then in zip(lstm._flat_weights, before))
    assert torch.equal(lstm(inputs)[0], expected)
    with torch.no_grad():
        lstm.weight_ih_l0.zero_()
    assert not torch.equal(lstm(inputs)[0], expected)


def test_an_embedding_that_is_tied_stays_tied() -> None:
    """One parameter in two modules is one after as before."""
    module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    before = module["embed"].weight.detach().clone()

    def change(module: nn.ModuleDict) -> None:
        with torch.no_grad():
            module["head"].weight.mul_(3)
        module["head"].weight = nn.Parameter(torch.zeros(5, 3))

    trial(module, change)
    assert module["head"].weight is module["embed"].weight
    assert torch.equal(module["embed"].weight, before)


def test_hooks_that_a_step_registers_are_gone() -> None:
    """And those that it removed are back, in their order."""
    module, calls = nn.Linear(2, 2), []
    first = module.register_forward_hook(lambda *_: calls.append(1))

    def change(module: nn.Linear) -> None:
        module.register_forward_hook(lambda *_: calls.append(2))
        first.remove()

    trial(module, change)
    module(torch.zeros(1, 2))
    assert calls == [1]


class Owner:
    """Counts in its own attributes what hooks tell it."""

    def __init__(self) -> None:
        self.calls = 0

    def hear(self, *_: Any) -> None:
        self.calls += 1


def test_what_hooks_write_to_is_undone() -> None:
    """Objects whose methods they are, objects and lists that they were defined around, on modules and on tensors."""
    module, method, around, heard = nn.Linear(2, 2), Owner(), Owner(), []
    module.register_forward_hook(method.hear)
    module.register_full_backward_hook(lambda *_: around.hear())
    module.weight.register_hook(lambda gradient: heard.append(1))  # type: ignore[func-returns-value]

    def change(module: nn.Linear) -> None:
        module(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert (method.calls, around.calls, len(heard)) == (1, 1, 1)

    trial(module, change)
    assert (method.calls, around.calls, heard) == (0, 0, [])


def test_an_object_that_cannot_be_copied_is_copied_by_attributes() -> None:
    """The lock is the same, the counter and the list beside it are not."""

    class Tracker:
        def __init__(self) -> None:
            self.lock, self.total, self.history = threading.Lock(), 0, [0]

    module, tracker = nn.Linear(1, 1), Tracker()
    module.tracker = tracker  # type: ignore[assignment]
    module.trackers = {"mine": tracker}  # type: ignore[assignment]

    def change(module: Any) -> None:
        assert module.tracker is not tracker
        assert module.tracker is module.trackers["mine"]
        assert module.tracker.lock is tracker.lock
        module.tracker.total += 1
        module.tracker.history.append(1)

    trial(module, change)
    assert module.tracker is tracker
    assert (tracker.total, tracker.history) == (0, [0])


def test_an_object_with_a_say_in_how_it_is_copied_or_closed_is_shared() -> None:
    """A second one might close what the first still needs."""

    class Connection:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __del__(self) -> None:
            """Close."""

    module, connection = nn.Linear(1, 1), Connection()
    module.connection = connection  # type: ignore[assignment]

    def change(module: Any) -> None:
        assert module.connection is connection

    trial(module, change)


METRICS: dict[str, Callable[[], torchmetrics.Metric]] = {
    "sums": lambda: torchmetrics.MeanMetric(),
    "counts": lambda: torchmetrics.classification.MulticlassAccuracy(3),
    "lists": lambda: torchmetrics.CatMetric(),
    "maximum": lambda: torchmetrics.MaxMetric(),
}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_goes_on_as_if_nothing_had_been_counted(kind: str, before: int) -> None:
    """States that are tensors or lists, update counts and cached results, in a collection and on its own."""

    def update(metric: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        if kind == "counts":
            metric.update(torch.rand(6, 3, generator=generator), torch.randint(3, (6,), generator=generator))
        else:
            metric.update(torch.rand(6, generator=generator))

    def module() -> nn.ModuleDict:
        collection = torchmetrics.MetricCollection({"a": METRICS[kind](), "b": METRICS[kind]()})
        return nn.ModuleDict({"one": METRICS[kind](), "several": collection})

    probed, oracle = module(), module()
    for each in (probed, oracle):
        for seed in range(before):
            update(each["one"], seed)
            update(each["several"], seed)

    def change(module: nn.ModuleDict) -> None:
        for seed in (7, 8):
            update(module["one"], seed)
            update(module["several"], seed)
        module["one"].compute()
        module["several"].compute()

    trial(probed, change)
    assert probed["one"].update_count == before
    assert probed["one"]._computed is None
    for each in (probed, oracle):
        update(each["one"], 20)
        update(each["several"], 20)
    assert torch.equal(probed["one"].compute(), oracle["one"].compute())
    ours, theirs = probed["several"].compute(), oracle["several"].compute()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- optimizers --------------------------------------------------------------------------------


def snapshot_of(value: Any) -> Any:
    """Optimizer state as data that can be compared exactly."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {(id(key) if isinstance(key, torch.Tensor) else key): snapshot_of(entry) for key, entry in value.items()}
    return [snapshot_of(entry) for entry in value] if isinstance(value, (list, tuple)) else value


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=2),
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_without_the_trial(kind: str, steps: int) -> None:
    """State that a trial created is gone, state that there was is as it was; the same steps follow."""
    results = []
    for probed in (True, False):
        net = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.3)
        optimizer = OPTIMIZERS[kind](net.parameters())
        for seed in range(steps):
            train(net, optimizer, seed)
        if probed:
            before = snapshot_of(vars(optimizer))
            tensors = {id(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)}
            values, kept = TensorValues(own_tensors(net)), OptimizerState(optimizer)
            for _ in range(2):
                train(net, optimizer, 50)
                train(net, optimizer, 51)
                values.restore()
                kept.restore()
                assert snapshot_of(vars(optimizer)) == before
            assert tensors == {
                id(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)
            }
        train(net, optimizer, 99)
        train(net, optimizer, 100)
        results.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    assert torch.equal(*results)


def test_settings_of_an_optimizer_come_back() -> None:
    """A learning rate changed, a group added, an attribute set, a counter raised, a hook's table kept."""

    class Counting(torch.optim.SGD):
        """Keeps books of its own, in an attribute and in nested lists."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.steps = 0
            self.books: dict[str, list[Any]] = {"norms": [torch.zeros(1)]}

    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = Counting(parameters)
    calls: list[int] = []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append(1))
    group, state, books, norm = optimizer.param_groups[0], optimizer.state, optimizer.books, optimizer.books["norms"][0]
    before = snapshot_of({name: value for name, value in vars(optimizer).items() if "hook" not in name})
    kept = OptimizerState(optimizer)

    optimizer.param_groups[0]["lr"] = 9.0
    optimizer.param_groups[0]["initial_lr"] = 9.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.steps += 5
    optimizer.books["norms"].append(1)
    optimizer.books["norms"][0].add_(1)
    optimizer.newcomer = 1  # type: ignore[attr-defined]
    optimizer.defaults["lr"] = 9.0
    optimizer.param_groups[0]["params"].append(parameters[0])
    kept.restore()

    assert snapshot_of({name: value for name, value in vars(optimizer).items() if "hook" not in name}) == before
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0] is group
    assert group["params"][0] is parameters[0]
    assert optimizer.state is state
    assert optimizer.books is books
    assert books["norms"][0] is norm
    optimizer.step()
    assert calls == [1]
    handle.remove()
    optimizer.step()
    assert calls == [1]


def test_an_optimizer_inside_an_optimizer_comes_back() -> None:
    """Look-ahead and the like wrap one that has the state."""

    class Wrapping(torch.optim.Optimizer):
        """Steps another optimizer."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    parameter = nn.Parameter(torch.ones(2))
    inner = torch.optim.Adam([parameter], lr=0.1)
    optimizer = Wrapping(inner)
    parameter.grad = torch.ones(2)
    optimizer.step()
    before = snapshot_of(inner.state)
    kept = OptimizerState(optimizer)
    optimizer.step()
    assert snapshot_of(inner.state) != before
    kept.restore()
    assert snapshot_of(inner.state) == before


# --- random numbers and attributes -------------------------------------------------------------


def test_random_numbers_go_on_as_before() -> None:
    """Torch, NumPy (the cached half of a pair of normal numbers too) and Python, as often as is asked."""

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()]

    draw()
    kept = RandomState()
    expected = draw()
    for _ in range(2):
        kept.restore()
        assert draw() == expected


def test_attributes_are_swapped_for_copies_and_put_back() -> None:
    """A copied value is changed in the trial only; any other is the same object throughout."""

    class Loop:
        def __init__(self) -> None:
            self.progress = {"ready": [1]}
            self.results = [1]
            self.flag = False

    loop = Loop()
    progress, results = loop.progress, loop.results
    kept = Attributes()
    kept.take(loop, "progress", copied=True)
    kept.take(loop, "results", "flag")
    for _ in range(2):
        kept.swap_in_copies()
        assert loop.progress == {"ready": [1]}
        assert loop.progress is not progress
        assert loop.results is results
        loop.progress["ready"].append(2)
        loop.flag, loop.results = True, []
    kept.restore()
    assert loop.progress is progress
    assert progress == {"ready": [1]}
    assert loop.results is results
    assert loop.flag is False


def test_an_attribute_that_is_not_there_is_not_kept() -> None:
    """A version of Lightning that no longer has it fails at once and names it."""
    with pytest.raises(KeyError, match="nothing"):
        Attributes().take(nn.Linear(1, 1), "nothing")
