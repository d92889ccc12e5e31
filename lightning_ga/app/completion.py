"""What the shell offers behind ``KEY=``: the choices of the table of values, and files where a path is wanted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Any

from hydra.plugins.completion_plugin import CompletionPlugin

from lightning_ga.app.arguments import HOME
from lightning_ga.app.values import FOLDER, RULES, shown

PATHS = ("ckpt_path", "model.init_from", "data.root", *(key for key, rule in RULES.items() if rule is FOLDER))
WORDS = {"ckpt_path": ("best", "last")}  # beside files


def values_of(word: str) -> list[str]:
    """Return how ``KEY=`` with the beginning of a value may go on; nothing for keys that take anything.

    Examples:
        >>> values_of("accumulate.on_oom=")
        ['accumulate.on_oom=raise', 'accumulate.on_oom=split']
    """
    key, sign, begun = word.partition("=")
    if not sign:
        return []
    rule = RULES.get(key)
    choices = [*map(shown, rule.choices if rule else ()), *WORDS.get(key, ())]
    if key in PATHS:
        full = HOME.sub(str(Path.home()), begun, count=1) if HOME.match(begun) else begun
        paths = glob(f"{escape(full)}*")  # noqa: PTH207 (what was typed begins the paths, be it ./ or nothing)
        choices += [f"{begun}{path[len(full) :]}{'/' if Path(path).is_dir() else ''}" for path in paths]
    return sorted(f"{key}={choice}" for choice in choices if choice.startswith(begun))


@contextmanager
def completed_values() -> Iterator[None]:
    """A context in which Hydra's completion offers these values."""
    query: Callable[..., list[str]] = CompletionPlugin._query

    def query_values(plugin: Any, config_name: str | None, line: str) -> list[str]:
        word = line.split(" ")[-1]
        return values_of(word) or query(plugin, config_name=config_name, line=line)

    CompletionPlugin._query = query_values  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        CompletionPlugin._query = query  # type: ignore[method-assign]
