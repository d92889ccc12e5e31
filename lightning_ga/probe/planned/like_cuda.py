"""CPU operators that keep as much memory for the backward pass as those of CUDA.

Two things differ by device. Under mixed precision, CUDA computes normalizations, losses and softmax in 32 bits and so
keeps larger activations (``aten/src/ATen/autocast_mode.h``, ``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE``).
And dropout keeps one byte for an element of its mask, where the CPU keeps a float
(``aten/src/ATen/native/Dropout.cpp``); with dropout, attention on the CPU has no fused kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Under autocast, floating arguments of these are cast to 32 bits ...
_IN_FLOAT = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt"),
    *("sinh", "softplus", "tan", "group_norm", "layer_norm", "logsumexp", "norm", "normalize", "renorm", "cdist"),
    *("cosine_similarity", "dist", "pdist", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "kl_div"),
    *("cross_entropy", "hinge_embedding_loss", "huber_loss", "l1_loss", "margin_ranking_loss", "mse_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss"),
    *("soft_margin_loss", "triplet_margin_loss"),
)
# ... and these give 32 bits unless they are told a dtype.
_TO_FLOAT = ("cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum")
_HALVES = (torch.float16, torch.bfloat16)


class LikeCuda(TorchFunctionMode):
    """Let functions whose memory differs between CPU and CUDA take what they take on CUDA, as a context."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as CUDA would."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "dropout":
            return _dropout(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(func, args, kwargs)
        if (name in _IN_FLOAT or name in _TO_FLOAT) and torch.is_autocast_enabled("cpu"):
            return _in_float(func, args, kwargs, to=name in _TO_FLOAT)
        return func(*args, **kwargs)


def _in_float(func: Callable[..., Any], args: Any, kwargs: Any, *, to: bool) -> Any:
    """Run a function in 32 bits, as autocast does."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not any(tensor.dtype in _HALVES for tensor in tensors):
        return func(*args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        if not to:
            return func(*map(_cast, args), **{name: _cast(value) for name, value in kwargs.items()})
        given = any(isinstance(value, torch.dtype) for value in args) or kwargs.get("dtype") is not None
        return func(*args, **(kwargs if given else {**kwargs, "dtype": torch.float32}))


def _cast(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _dropout(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the fused kernel if CUDA would take it."""
    names = ("input", "p", "training", "inplace")
    given = {**dict(zip(names, args)), **kwargs}
    if "train" in given:  # ``torch.dropout`` calls it so
        given["training"] = given.pop("train")
    p, training, inplace = given.get("p", 0.5), given.get("training", True), given.get("inplace", False)
    if not training or inplace or not 0 < p < 1:
        return func(*args, **kwargs)
    return torch.native_dropout(given["input"], p, True)[0]


def _attention(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run attention without dropout, which a fused kernel of CUDA draws again in the backward pass."""
    args = list(args)
    if len(args) > 4:
        args[4] = 0.0
    return func(*args, **{name: value for name, value in kwargs.items() if name != "dropout_p"})
