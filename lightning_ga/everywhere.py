"""The callback that an environment variable puts into every Trainer of a process."""

import ast
import shlex
from functools import cache
from inspect import signature
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_ga import weights
from lightning_ga.callback import AutoAccumulate
from lightning_ga.errors import UserError


class FromEnvironment(AutoAccumulate):
    """Leaves a Trainer to the ``AutoAccumulate`` that a script has put there itself."""

    _is_alone = False

    @property
    def state_key(self) -> str:
        """In checkpoints that of ``AutoAccumulate``; another one before, as Lightning refuses two of one key."""
        return (AutoAccumulate if self._is_alone else FromEnvironment).__qualname__

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Join the fit or evaluation, or leave the Trainer."""
        others = [callback for callback in trainer.callbacks if callback is not self]
        self._is_alone = not any(isinstance(callback, AutoAccumulate) for callback in others)
        if self._is_alone:
            super().setup(trainer, pl_module, stage)
        else:
            trainer.callbacks = others


def make(variable: str, given: str) -> AutoAccumulate:
    """Make the callback for the value of a variable, and say once that it is in use."""
    callback = FromEnvironment(**read(variable, given))
    say(f"{variable}={given}: {callback!r} is in every Trainer of this process.")
    return callback


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
    known = [name for name in signature(AutoAccumulate).parameters if name != "scale_beta2"]
    arguments: dict[str, Any] = {}
    for word in shlex.split(given) if given != "1" else ():
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise UserError(
                f"{variable}={given!r}: {word!r} is no ARGUMENT=VALUE of AutoAccumulate, which has {', '.join(known)}; "
                f"{variable}=1 is AutoAccumulate()."
            )
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = getattr(weights, value)() if value in weights.__all__ else value
    return arguments
