"""What the shell offers behind ``KEY=``: the choices of the table of values, and files where a path is wanted."""

from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Any

from hydra.plugins.completion_plugin import CompletionPlugin

from lightning_ga.app.arguments import HOME
from lightning_ga.app.values import FILE, FOLDER, RULES, shown


def values_of(word: str) -> list[str]:
    """Return how ``KEY=`` with the beginning of a value may go on; nothing for keys that take anything.

    Examples:
        >>> values_of("accumulate.on_oom=")
        ['accumulate.on_oom=raise', 'accumulate.on_oom=split']
    """
    key, sign, begun = word.partition("=")
    rule = RULES.get(key)
    if not sign or rule is None:
        return []
    choices = [*map(shown, rule.choices), *(("best", "last") if key == "ckpt_path" else ())]
    if rule in (FILE, FOLDER):
        full = HOME.sub(str(Path.home()), begun, count=1) if HOME.match(begun) else begun
        paths = glob(f"{escape(full)}*")  # noqa: PTH207 (what was typed begins the paths, be it ./ or nothing)
        choices += [f"{begun}{path[len(full) :]}{'/' if Path(path).is_dir() else ''}" for path in paths]
    return sorted(f"{key}={choice}" for choice in choices if choice.startswith(begun))


@contextmanager
def completed_values() -> Iterator[None]:
    """A context in which Hydra's completion offers these values."""
    query: Any = CompletionPlugin._query

    def query_values(plugin: Any, config_name: str | None, line: str) -> list[str]:
        return values_of(line.split(" ")[-1]) or query(plugin, config_name=config_name, line=line)

    CompletionPlugin._query = query_values  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        CompletionPlugin._query = query  # type: ignore[method-assign]
