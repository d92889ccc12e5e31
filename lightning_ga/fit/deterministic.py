"""Switch off dropout of all kinds, and nothing else, so that a step draws no random numbers by design.

Evaluation mode would not do: code that reads ``self.training`` then runs another model, as detectors do
that return losses in training alone.
"""

from typing import Any

import torch
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode

_DROPS = ("dropout", "droppath", "dropblock", "stochasticdepth", "layerdrop")
_OF_DROPS = ("p", "prob", "rate", "drop_prob")
_RATES = (
    *("dropout", "dropout_p", "dropout_prob", "attention_dropout", "attn_dropout", "activation_dropout"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "layerdrop"),
)
_NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
_DROPOUTS = {
    getattr(home, name + ending)
    for home in (functional, torch)
    for name in _NAMES
    for ending in ("", "_")
    if hasattr(home, name + ending)
}


class WithoutDropout(TorchFunctionMode):
    """A context without functional dropout, that of attention included: it returns its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def stop_dropping(module: Module) -> None:
    """Set the rates of all layers that drop values to zero: dropout, stochastic depth, attention, RNNs.

    The rates are plain attributes; a snapshot of the module's attributes restores them.
    """
    for part in module.modules():
        drops = any(name in type(part).__name__.lower() for name in _DROPS)
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and 0 < value <= 1 and (name in _RATES or (drops and name in _OF_DROPS)):
                vars(part)[name] = 0.0
