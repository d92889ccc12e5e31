"""The arithmetic of the exactness check: as precise as memory allows, and the rounding that is left."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lightning_ga.compat import patching


def rounding(trainer: Any, *, plain: bool = True) -> float:
    """Return the relative difference that precision explains: of the weights, or of autocast where it stays on."""
    if not plain and hasattr(trainer.precision_plugin, "autocast_context_manager"):
        return 5e-2 if "bf16" in str(trainer.precision) else 1e-2
    dtypes = {p.dtype for p in trainer.lightning_module.parameters() if p.requires_grad and p.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2 if torch.bfloat16 in dtypes else 1e-2
    return 1e-6 if dtypes == {torch.float64} else 1e-4  # losses may be computed in fp32 all the same


@contextmanager
def exact_arithmetic(trainer: Any, *, plain: bool) -> Iterator[None]:
    """Return a context without TF32 in which steps compute in the precision of the weights, if that is to be ``plain``.

    Autocast would hide differences.
    """
    plugin = trainer.precision_plugin
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    casts = plain and hasattr(plugin, "autocast_context_manager")
    try:
        with patching.shadowed(plugin, "forward_context", nullcontext) if casts else nullcontext():
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.set_float32_matmul_precision(matmul)
