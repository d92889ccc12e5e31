"""``LIGHTNING_GA=1 python train.py``: the callback in every Trainer of a process, without a line of code.

Lightning calls the entry points of ``lightning.pytorch.callbacks_factory`` for every Trainer that is made
(``trainer/connectors/callback_connector.py:84`` of 2.6.6), so this module imports nothing heavy without the variable.
"""

import os
from typing import Any

VARIABLE = "LIGHTNING_GA"


def callbacks() -> list[Any]:
    """Return ``AutoAccumulate`` if the variable is ``1`` or arguments, such as ``memory_budget=10GiB``."""
    given = os.environ.get(VARIABLE, "")
    if given in ("", "0"):
        return []
    from lightning_ga.everywhere import make

    return [make(VARIABLE, given)]
