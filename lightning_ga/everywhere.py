"""The callback that an environment variable puts into every Trainer of a process.

Tested in tests/test_environment.py.
"""

import ast
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_ga.callback import AutoAccumulate
from lightning_ga.compat.patching import Callback
from lightning_ga.errors import UserError


class FromEnvironment(Callback):
    """Adds a callback to the Trainer when it starts, unless the script has put ``AutoAccumulate`` there itself."""

    def __init__(self, accumulate: AutoAccumulate) -> None:
        self._accumulate = accumulate

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Add it; the Trainer calls its later hooks, and its ``setup`` in a second fit."""
        if not any(isinstance(callback, AutoAccumulate) for callback in trainer.callbacks):
            trainer.callbacks = [self._accumulate, *trainer.callbacks]
            self._accumulate.setup(trainer, pl_module, stage)


def make(variable: str, given: str) -> FromEnvironment:
    """Make the callback for the value of a variable, and say once that it is in use."""
    accumulate = AutoAccumulate(**read(variable, given))
    say(f"{variable}={given}: {accumulate!r} is in every Trainer of this process.")
    return FromEnvironment(accumulate)


@cache
def say(sentence: str) -> None:
    """Print a sentence once in a process, on rank 0."""
    rank_zero_info(sentence)


def read(variable: str, given: str) -> dict[str, Any]:
    """Read arguments that are separated by blanks; a value is a Python literal, the name of a counter, or a text.

    Raises:
        UserError: For a word that is no argument of ``AutoAccumulate`` and its value.

    Examples:
        >>> read("LIGHTNING_GA", "effective_batch_size={0:32,2:64} memory_budget=10GiB verify=False")
        {'effective_batch_size': {0: 32, 2: 64}, 'memory_budget': '10GiB', 'verify': False}
    """
    known = signature(AutoAccumulate).parameters
    arguments: dict[str, Any] = {}
    if given == "1":
        return arguments
    for word in given.split():
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise UserError(
                f"{variable}={given!r}: {word!r} is no ARGUMENT=VALUE of AutoAccumulate, which has {', '.join(known)}; "
                f"{variable}=1 is AutoAccumulate()."
            )
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            counters = import_module("lightning_ga.counters")
            counter = getattr(counters, value, None)
            arguments[name] = counter() if isinstance(counter, type) else value
    return arguments
