"""Switch off what drops values, and nothing else: evaluation mode would also switch BatchNorm, and detectors' losses.

Tested in tests/test_audit.py and tests/fit/exactness/test_measure.py.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import Module, functional

_DROPPING = "dropout|droppath|dropblock|stochasticdepth|layerdrop"  # in names of layers that drop values
_RATES_OF_DROPPING = ("p", "prob", "rate", "drop_prob")  # attributes of such layers
_RATES = "dropout|layerdrop|drop_path|drop_rate|drop$"  # in names of attributes of any layer
_FUNCTIONS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def stop_dropping(module: Module) -> None:
    """Set the rates of all layers that drop values to zero: dropout, stochastic depth, attention, RNNs.

    The rates are plain attributes, which the caller puts back.
    """
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and 0 < value <= 1 and _is_rate(type(part), name):
                vars(part)[name] = 0.0


def _is_rate(layer: type, name: str) -> bool:
    """Return whether an attribute of a layer of this type is the share of values that it drops."""
    if name in _RATES_OF_DROPPING:
        return re.search(_DROPPING, layer.__name__.lower()) is not None
    return re.search(_RATES, name) is not None


@contextmanager
def without_dropout() -> Iterator[None]:
    """Return a context in which the functions of ``torch.nn.functional`` drop nothing, also in a backward pass."""
    called = functional._VF  # type: ignore[attr-defined]  # these functions call it
    kept: Any = {name: lambda values, *_: values for base in _FUNCTIONS for name in (base, f"{base}_")}
    stock = functional.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        return stock(query, key, value, attn_mask, 0 * dropout_p, *rest, **named)

    with (
        mock.patch.multiple(called, **kept),
        mock.patch.object(functional, "scaled_dot_product_attention", attend),
    ):
        yield
