"""What a forward pass tells of submodules: the oracle is a step in which each is computed again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recompute_programs import EXACT, REFUSED, WIDTH, with_inner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ga import recomputed
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.models.gpt import Decoder
from lightning_ga.recompute.survey import compare, survey


def step_of(net: nn.Module, width: int = WIDTH, samples: int = 12) -> Callable[[], None]:
    def step() -> None:
        torch.manual_seed(1)
        net(torch.randn(samples, width)).square().mean().backward()

    return step


def decoder_step(net: Decoder, samples: int) -> None:
    torch.manual_seed(1)
    net(torch.randint(16, (samples, 32))).square().mean().backward()


def kept_after_forward(net: Decoder, names: list[str]) -> int:
    """Return the bytes that are alive between the forward and the backward pass."""
    tokens = torch.randint(16, (4, 32))
    with recomputed(net, names), LiveTensorMeter() as meter:
        loss = net(tokens).square().mean()
        alive = meter.live_bytes
    del loss
    return alive


def test_a_block_frees_what_a_real_forward_pass_keeps_less() -> None:
    net = Decoder(16, 32, 32, 3, 2)
    root = survey(net, partial(decoder_step, net, 4))
    found = {each.name: each for each in with_inner(root)}
    plain = kept_after_forward(net, [])
    for name in ("blocks.0", "blocks.1", "blocks.2", "blocks.1.mlp", "blocks.1.mlp.1"):
        assert found[name].frees == plain - kept_after_forward(net, [name]), name
    assert [each.name for each in root.inner] == ["token", "place", "blocks", "norm"]
    assert all(each.seconds > 0 for each in found.values())
    assert all(p.grad is None for p in net.parameters()), "no backward pass runs"


def test_nothing_that_autograd_saves_is_kept() -> None:
    """The survey's own peak is that of a forward pass without gradients."""
    net = Decoder(16, 32, 32, 6, 2)
    peaks = []
    for run in (lambda: net(torch.randint(16, (4, 32))), lambda: survey(net, partial(decoder_step, net, 4))):
        with torch.set_grad_enabled(bool(peaks)), LiveTensorMeter() as meter:
            run()
        peaks.append(meter.peak_bytes)
    assert peaks[1] <= 1.3 * peaks[0]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", sorted(EXACT.keys() - {"own checkpoint, reentrant"}))
def test_programs_with_the_same_gradient_pass_the_comparison(kind: str) -> None:
    """It leaves gradients alone, and the state that one forward pass leaves."""
    torch.manual_seed(0)
    net, other = EXACT[kind](), EXACT[kind]()
    other.load_state_dict(net.state_dict())
    assert compare({"part": net.part}, step_of(net)) == {}
    assert all(p.grad is None for p in net.parameters())


def test_pytorchs_reentrant_checkpoint_within_is_refused() -> None:
    net = EXACT["own checkpoint, reentrant"]()
    (reason,) = compare({"part": net.part}, step_of(net)).values()
    assert reason.startswith("When use_reentrant")


@pytest.mark.parametrize("kind", REFUSED)
def test_programs_with_another_gradient_are_refused_in_one_sentence(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, sentence = REFUSED[kind]
    net = make()
    with caplog.at_level("INFO"):
        root = survey(net, step_of(net), step_of(net))
    (part,) = (each for each in with_inner(root) if each.name == "part")
    assert part.refused
    assert sentence in caplog.text
    assert "part" not in root.chosen(1e9)


def test_the_state_after_a_comparison_is_that_of_one_forward_pass() -> None:
    torch.manual_seed(0)
    nets = [EXACT["BatchNorm"]() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    compare({"part": nets[0].part}, step_of(nets[0]))
    drawn = torch.rand(2)
    step_of(nets[1])()
    assert torch.equal(drawn, torch.rand(2))
    assert all(map(torch.equal, nets[0].buffers(), nets[1].buffers()))


class Penalized(nn.Module):
    """Differentiates within its forward pass, and runs ``behind`` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
        self.behind = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return self.behind(x) + gradient.square().sum(1, keepdim=True)


def test_what_comes_behind_a_gradient_in_the_forward_pass_is_seen() -> None:
    net = Penalized()
    root = survey(net, step_of(net), step_of(net))
    assert {each.name for each in with_inner(root)} >= {"critic", "behind"}
    assert {"behind"} <= root.chosen(1e9).keys()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))


class Blocks(nn.Module):
    """Blocks and heads in turn; ``run`` says how a block is called."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(layers() for _ in range(2))
        self.heads = nn.ModuleList(layers() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block, head in zip(self.blocks, self.heads):
            x = head(self.run(block, x))
        return x


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def chosen(net: nn.Module) -> set[str]:
    return {*survey(net, step_of(net), step_of(net)).chosen(0)}


def test_parts_that_checkpoint_already_or_are_frozen_or_compiled_are_no_candidates() -> None:
    assert any(name.startswith("blocks") for name in chosen(Blocks(plain)))
    assert not any(name.startswith("blocks") for name in chosen(Blocks(checkpointed)))
    frozen = Blocks(plain)
    frozen.blocks[0].requires_grad_(False)  # and nothing before it is trained
    assert not any(name.startswith("blocks.0") for name in chosen(frozen))
    compiled = Blocks(plain)
    compiled.blocks[0] = torch.compile(compiled.blocks[0], backend="eager")
    compiled.blocks[1].compile(backend="eager")
    names = chosen(compiled)
    assert any(name.startswith("heads") for name in names)
    assert not any(name.startswith("blocks") for name in names)


def test_submodules_of_a_compiled_function_are_no_candidates() -> None:
    net = Blocks(plain)
    called: Any = torch.compile(net.forward, backend="eager")

    def step() -> None:
        called(torch.randn(12, WIDTH)).square().mean().backward()

    assert survey(net, step).chosen(0) == {}
