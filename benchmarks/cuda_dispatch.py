"""Activations as PyTorch's own dispatch for CUDA keeps them, worked out without a GPU.

Tensors without values may claim to lie on a CUDA device: operators, dropout and autocast are then those of CUDA. Only
attention is given the kernel of a recent GPU. PyTorch 2.15 cannot run a backward pass on such tensors, so what is
compared is what the forward pass leaves alive: parameters, buffers, batch and saved activations.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from benchmarks.planning_cases import CLASSES, TOKENS, convolutions, transformer
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.probe.planned.estimate import LikeCuda

SAMPLES = 16
Make = Callable[[], tuple[nn.Module, Tensor]]


def _pictures(name: str, size: int, **arguments: Any) -> Make:
    return lambda: (timm.create_model(name, num_classes=CLASSES, **arguments), torch.empty(SAMPLES, 3, size, size))


def _encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * TOKENS, CLASSES)), torch.empty(SAMPLES, TOKENS, 64)


FORWARD: dict[str, Make] = {
    "convolutions, BatchNorm, dropout": lambda: (convolutions(), torch.empty(SAMPLES, 3, 32, 32)),
    "ResNet-18": _pictures("resnet18", 64),
    "ConvNeXt atto": _pictures("convnext_atto", 64),
    "ViT tiny, dropout": _pictures("vit_tiny_patch16_224", 224, drop_rate=0.1),
    "transformer, SDPA": lambda: (transformer(), torch.empty(SAMPLES, TOKENS, dtype=torch.int64)),
    "nn.TransformerEncoderLayer": _encoder,
}


class FusedAttention(TorchFunctionMode):
    """The kernels that a recent GPU takes: flash attention in half precision, the memory-efficient one in 32 bits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "scaled_dot_product_attention":
            return func(*args, **kwargs)
        q, k, v = args[:3]
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        causal = kwargs.get("is_causal", False)
        if torch.is_autocast_enabled("cuda"):
            q, k, v = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (q, k, v))
        if q.dtype is torch.float32:
            return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout, causal)[0]
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal)[0]


@contextmanager
def autocast(device: str) -> Iterator[None]:
    """``torch.autocast`` in bfloat16, which refuses CUDA where there is none."""
    with (
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda *_: True),
        torch.autocast(device, torch.bfloat16, cache_enabled=False),
    ):
        yield


def alive_after_forward(make: Make, device: str, *, half: bool, like_cuda: bool) -> int:
    """Bytes, by CUDA's rounding, that are alive before the backward pass."""
    net, batch = make()
    modes = LikeCuda() if like_cuda else FusedAttention() if device == "cuda" else nullcontext()
    meter = LiveTensorMeter(device=device, rounding=512)
    with FakeTensorMode(), torch.device(device), modes, meter:
        inputs = torch.empty(batch.shape, dtype=batch.dtype)
        net._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        with autocast(device) if half else nullcontext():
            outputs = net(inputs)
            loss = F.cross_entropy(outputs, torch.empty(SAMPLES, *outputs.shape[2:], dtype=torch.int64))
        assert loss.requires_grad
        return meter.live_bytes


def forward_rows() -> list[dict[str, Any]]:
    """What is alive by CUDA's own dispatch, by an estimate, and by CPU operators left as they are."""
    rows = []
    for name, make in FORWARD.items():
        for half in (False, True):
            cuda = alive_after_forward(make, "cuda", half=half, like_cuda=False)
            ours, cpu = (alive_after_forward(make, "cpu", half=half, like_cuda=like) for like in (True, False))
            rows.append({"case": name, "bf16-mixed": half, "cuda": cuda, "estimate": ours, "cpu": cpu})
    return rows
