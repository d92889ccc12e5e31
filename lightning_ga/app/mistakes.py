"""A mistake in one sentence: the package's own, else the message of the library that found it."""

import inspect
import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TypeVar

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.app.mistyped import of_line
from lightning_ga.app.other_tools import Groups
from lightning_ga.errors import UserError

LONGEST = 600  # signs of a library's message: names of weights may be many
ARGUMENTS = (  # of AutoAccumulate, as its messages name them
    "effective_batch_size|micro_batch_size|max_micro_batch_size|micro_batch_multiple|objective|memory_budget|normalize|"
    "micro_batching|on_oom|batch_norm|whole|size_of|checkpoint|scale_lr|verify|cache|shares"
)
IN_OUR_WORDS = {  # patterns of sentences that are written for scripts, and what stands for them on a command line
    r"(?<![\w.])whole=\((.*?),?\)": r"whole=[\1]",
    r"give the right key=…": "name it, as in 'accumulate.normalize={_target_:TargetTokens,key:1}'",
    r"lightning_ga\.counters\.(\w+)\(\)": r"\1",
    r"(?<![\w.])accumulate=(?=[\d{])": "accumulate.accumulate=",
    r"(?<![\w.])every=": "checkpoint_every=",  # of CheckpointEvery
    rf"(?<![\w.])({ARGUMENTS})(?==)": r"accumulate.\1",
}
# Patterns of whole messages of libraries, and what is said in their place.
ANSWERS: Mapping[str, str] = json.loads(Path(__file__).with_name("answers.json").read_text("utf-8"))
Kind = TypeVar("Kind", bound=BaseException)


def explain(error: BaseException, overrides: Sequence[str] = (), groups: Groups | None = None) -> str:
    """One sentence for an error; it names the mistyped one of the ``overrides``, and options of ``groups``."""
    said = link_of(UserError, error) or link_of(OmegaConfBaseException, error) or error
    sentence = of_line(error, said, overrides, groups or {}) or of_library(error, said, overrides)
    return " ".join([sentence, *(note for link in chain(error) for note in getattr(link, "__notes__", []))])


def of_library(error: BaseException, said: BaseException, overrides: Sequence[str]) -> str:
    """The package's own sentence whole, because its end is the remedy; else the answer to a message, or the message."""
    if isinstance(said, UserError):
        return on_the_line(" ".join(str(said).split()))
    text = one_line(error)
    if isinstance(error, OverrideParseException):
        return answer_to(f"{error.override} is no override: {text}")
    if isinstance(said, OmegaConfBaseException):
        text = ": ".join(filter(None, [said.full_key, one_line(said)]))
    elif not isinstance(error, HydraException):
        cause = link_of(OSError, error) or error  # torch hides a full disk
        text = f"{type(cause).__name__}: {one_line(cause)}"
    return of_values(answer_to(text) or f"{text} (--traceback shows all)", overrides)


def answer_to(text: str) -> str:
    """What to do about the message of a library, where that is known; else nothing."""
    for pattern, answer in ANSWERS.items():
        found = re.fullmatch(pattern, text)
        if found:
            return found.expand(answer)
    return ""


def of_values(text: str, overrides: Sequence[str]) -> str:
    """The message of a library, after the typed values that it names."""
    named = [word.lstrip("+") for word in overrides if "." in word.partition("=")[0] and is_named(word, text)]
    return f"{', '.join(named)}: {text}" if named else text


def is_named(word: str, text: str) -> bool:
    """Whether a message names the value of an override, or the last part of its key."""
    key, equals, value = word.partition("=")
    for name in (key.rpartition(".")[2], value):
        is_telling = len(name) > 2 or name.startswith("-")
        if equals and is_telling and re.search(rf"(?<![\w.-]){re.escape(name)}(?!\w)", text, re.IGNORECASE):
            return True
    return False


def on_the_line(sentence: str) -> str:
    """A sentence of the callback, with its arguments as keys of this command line."""
    for pattern, ours in IN_OUR_WORDS.items():
        sentence = re.sub(pattern, ours, sentence)
    return sentence


def link_of(kind: type[Kind], error: BaseException) -> Kind | None:
    """The first of an error and its causes that is of this kind."""
    for link in chain(error):
        if isinstance(link, kind):
            return link
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, from the outside in, but for those that ``raise … from None`` leaves out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        following = error.__cause__
        if following is None and not error.__suppress_context__:
            following = error.__context__
        error = following


def one_line(error: BaseException) -> str:
    """The first paragraph of a message, on one line; the line of the program if there is no message."""
    text, _, trace = inspect.cleandoc(str(error)).partition("\nOriginal Traceback")  # of a data worker
    paragraph = " ".join([re.split(r"\n\n|\n *full_key:", text)[0], *trace.splitlines()[-1:]])
    if paragraph.strip():
        return shorten(paragraph, LONGEST, placeholder=" …")
    for line in traceback.extract_tb(error.__traceback__)[-1:]:
        return f"{line.line} ({Path(line.filename).name}, line {line.lineno})"
    return type(error).__name__
