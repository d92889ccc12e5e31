"""Support both of Lightning's namespaces: ``lightning.pytorch`` and, where installed, ``pytorch_lightning``."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import lightning.pytorch as pl

if TYPE_CHECKING or find_spec("pytorch_lightning") is None:
    Callback = pl.Callback
    MODULES: tuple[type[pl.LightningModule], ...] = (pl.LightningModule,)
else:
    import pytorch_lightning

    class Callback(pl.Callback, pytorch_lightning.Callback):
        """A callback that trainers of both namespaces accept: each checks the type."""

    MODULES = (pl.LightningModule, pytorch_lightning.LightningModule)
