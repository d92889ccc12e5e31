"""Let the replicas of a sharded model (HSDP: FSDP 2 over a mesh of two axes) exchange gradients once a window.

Lightning lets them all-reduce after each micro-batch (``strategies/model_parallel.py``, 2.6.6). Between the ranks of a
replica gradients are still scattered after each, because only the shards fit.

Tested in tests/integration/test_sharded.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat import ranks
from lightning_ga.compat.reduction import Exchange


class ReplicaExchange:
    """The exchange of gradients between replicas, in the last pass of each window; no error is survived."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules

    def begin_window(self) -> None:
        """Begin a window, in which nothing is shared before its passes."""

    @contextmanager
    def pass_(self, *, last: bool) -> Iterator[None]:
        """Return a context for a forward and backward pass; the window's ``last`` exchanges gradients."""
        for module in self._modules:
            module.set_requires_all_reduce(last, recurse=False)
        try:
            yield
        finally:
            for module in self._modules:
                module.set_requires_all_reduce(True, recurse=False)

    def finish(self) -> None:
        """End a window, whose last pass has exchanged its gradients."""


AnyExchange = Exchange | ReplicaExchange


def exchange_of(trainer: Any, before_sending: Callable[[], object]) -> AnyExchange | None:
    """Return how the ranks of a Trainer exchange gradients; ``None`` if that is left to its strategy."""
    module = trainer.strategy.model
    if isinstance(module, DistributedDataParallel):
        return Exchange(module, ranks.obstacle(trainer), trainer.precision_plugin, before_sending)
    shards = [part for part in trainer.lightning_module.modules() if hasattr(part, "set_requires_all_reduce")]
    meshes = [getattr(parameter, "device_mesh", None) for part in shards for parameter in part.parameters()]
    has_replicas = any(mesh is not None and mesh.ndim > 1 for mesh in meshes)
    return ReplicaExchange(shards) if has_replicas else None
