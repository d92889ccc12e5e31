"""Lightning's two namespaces: ``lightning.pytorch``, and ``pytorch_lightning`` where that is installed."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import lightning.pytorch as pl

if TYPE_CHECKING or find_spec("pytorch_lightning") is None:
    Callback = pl.Callback
else:
    import pytorch_lightning

    class Callback(pl.Callback, pytorch_lightning.Callback):
        """A callback that trainers of both namespaces take: each checks the type."""


def namespace_of(module: object) -> str | None:
    """Return the namespace of a LightningModule; ``None`` if it is none."""
    for base in type(module).__mro__:
        root = base.__module__.partition(".core.")[0]
        if base.__name__ == "LightningModule" and root in ("lightning.pytorch", "pytorch_lightning"):
            return root
    return None
