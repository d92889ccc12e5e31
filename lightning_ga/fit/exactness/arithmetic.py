"""The arithmetic of the check: without dropout, as precise as memory allows, and the rounding that is left.

Evaluation mode would switch off more than dropout: code that reads ``self.training`` then runs another model, as
detectors do that return losses in training alone.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Self

import torch
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode

from lightning_ga.compat import patching

_DROPS = ("dropout", "droppath", "dropblock", "stochasticdepth", "layerdrop")
_OF_DROPS = ("p", "prob", "rate", "drop_prob")
_RATES = (
    *("dropout", "dropout_p", "dropout_prob", "attention_dropout", "attn_dropout", "activation_dropout"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "layerdrop"),
)
_FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout", "feature_dropout"),
)  # of torch and torch.nn.functional; those that work in place end in an underscore
_ATTENTION = functional.scaled_dot_product_attention


class WithoutDropout(TorchFunctionMode):
    """A context without functional dropout, that of attention included: it returns its input.

    In a backward pass the mode is off, and what is computed again there (activation checkpointing) finds other
    functions of torch.
    """

    def __enter__(self) -> Self:
        called = functional._VF  # type: ignore[attr-defined]  # by the functions of torch.nn.functional
        names = [name for base in _FUNCTIONS for name in (base, f"{base}_") if hasattr(called, name)]
        self._held = ExitStack()
        dropless, attends = {name: _dropless(getattr(called, name)) for name in names}, _dropless(_ATTENTION)
        self._held.enter_context(patching.replaced(called, **dropless))
        self._held.enter_context(patching.replaced(functional, scaled_dot_product_attention=attends))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._held.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _undropped(func, *args, **(kwargs or {}))


def _dropless(function: Any) -> Any:
    return wraps(function)(lambda *args, **kwargs: _undropped(function, *args, **kwargs))


def _undropped(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch so that it drops nothing."""
    if getattr(func, "__name__", "").removesuffix("_") in _FUNCTIONS:
        return args[0] if args else kwargs["input"]
    if func is _ATTENTION:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
    return func(*args, **kwargs)


def eager() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run as they were written: a few samples make no graphs to keep."""
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return nullcontext() if stance is None else stance("force_eager")


def stop_dropping(module: Module) -> None:
    """Set the rates of all layers that drop values to zero: dropout, stochastic depth, attention, RNNs.

    The rates are plain attributes; a snapshot of the module's attributes restores them.
    """
    for part in module.modules():
        drops = any(name in type(part).__name__.lower() for name in _DROPS)
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and 0 < value <= 1 and (name in _RATES or (drops and name in _OF_DROPS)):
                vars(part)[name] = 0.0


def rounding(trainer: Any, *, plain: bool = True) -> float:
    """Return the relative difference that precision explains: of the weights, or of autocast if it stays on."""
    if not plain and hasattr(trainer.precision_plugin, "autocast_context_manager"):
        return 5e-2 if "bf16" in str(trainer.precision) else 1e-2
    dtypes = {p.dtype for p in trainer.lightning_module.parameters() if p.requires_grad and p.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2 if torch.bfloat16 in dtypes else 1e-2
    return 1e-6 if dtypes == {torch.float64} else 1e-4  # losses may be computed in fp32 all the same


@contextmanager
def exact_arithmetic(trainer: Any, *, plain: bool) -> Iterator[None]:
    """Return a context without TF32; with ``plain``, steps compute in the precision of the weights.

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
