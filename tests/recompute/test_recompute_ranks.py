"""Submodules that are computed again under DDP and FSDP 2, on gloo ranks: the oracle is the same step without."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from recompute_programs import with_inner
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_ga import recomputed
from lightning_ga.recompute.survey import survey

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Blocks with dropout and BatchNorm, and a layer that is not called."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        kinds = [nn.BatchNorm1d(8)] if norm else []
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *kinds, nn.Dropout(0.2), nn.Linear(8, 8)) for _ in range(3)
        )
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(net: nn.Module, called: nn.Module, names: list[str]) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Tensor] = []
    with recomputed(net, names):
        for number in range(3):
            torch.manual_seed(10 * number + dist.get_rank())
            optimizer.zero_grad()
            called(torch.randn(6, 8)).backward()
            seen += [whole(p.grad) for p in net.parameters() if p.grad is not None]
            optimizer.step()
    return [*seen, *(buffer.clone() for buffer in net.buffers())]


def under_ddp(settings: dict[str, Any], freezes: bool) -> list[list[Tensor]]:
    dist.init_process_group("gloo")
    found = []
    for names in ([], ["blocks.0", "blocks.1", "blocks.2"]):
        torch.manual_seed(0)
        net = Net()
        net.unused.requires_grad_(not freezes)
        found.append(gradients(net, DistributedDataParallel(net, **settings), names))
    dist.destroy_process_group()
    return found


def under_fsdp() -> list[Any]:
    dist.init_process_group("gloo")
    found: list[Any] = []
    for names in ([], ["blocks.0", "blocks.1", "blocks.2"], ["blocks.0", "blocks.2"]):
        torch.manual_seed(0)
        net = Net(norm=False)
        del net.unused
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if not found:

            def step(net: nn.Module = net) -> None:
                net(torch.ones(6, 8)).backward()

            root = survey(net, step, step)
            refused = {each.name: each.refused for each in with_inner(root) if each.refused}
            found.append(([*root.chosen(root.frees)], refused))
        found.append(gradients(net, net, names))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("settings", "freezes"), [({}, True), ({"find_unused_parameters": True}, False)], ids=str)
def test_under_ddp(settings: dict[str, Any], freezes: bool, tmp_path: Path) -> None:
    for plain, ours in on_ranks(under_ddp, tmp_path, settings, freezes):
        assert len(plain) > 20
        assert all(map(torch.equal, plain, ours))


def test_under_fsdp(tmp_path: Path) -> None:
    """The survey and the comparison of gradients run there, too."""
    for (names, refused), plain, ours, some in on_ranks(under_fsdp, tmp_path):
        assert refused == {}
        assert names
        assert len(plain) >= 36
        assert all(map(torch.equal, plain, ours))
        assert all(map(torch.equal, plain, some))
