"""A user's mistake in one sentence: what was wrong, and the nearest right thing.

Hydra tells a wrong option, an unknown key and a failed constructor in traces of several errors.
:func:`explain` turns such a chain into one line; everything that it does not know is a bug of the
package and keeps its traceback. Nothing is imported to explain what the configuration alone tells.
"""

import errno
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped] # it ships no types

from lightning_ga.app.values import walk
from lightning_ga.errors import UserError

EXPECTED = (UserError, HydraException, OmegaConfBaseException, YAMLError, UnicodeEncodeError)
FULL = (  # the system does not always name the file
    *(errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.ECONNREFUSED, errno.EHOSTUNREACH),
)
NAMED = (  # of a file or folder that the user named, to write or to read
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG),
)
READERS = re.compile(r"(omegaconf|hydra|yaml)\.")  # modules that go as deep as a configuration nests
PLUGINS = {"optuna": "'lightning_ga[sweep]'", "joblib": "hydra-joblib-launcher"}
RESTORING = {"resume_start", "_restore_modules_and_callbacks", "restore_training_state"}  # functions of Lightning
BEFORE_DATA = {"build_model", "model_to_device"}  # functions of this package and of Lightning
WITHOUT = {"accumulate": "off", "logger": "none", "callbacks": "none", "lr_scheduler": "none"}
LOGGERS = ("wandb", "mlflow")  # packages whose errors are about accounts, servers and networks
TYPESET = re.compile("[“”„‟‘’‚‛«»‹›]")
FOLDER_KEYS = "hydra.run.dir=FOLDER for this run, hydra.sweep.dir=FOLDER for a sweep, paths.output_root=FOLDER for all"


def explain(error: BaseException, keys: Sequence[str] = ()) -> str | None:
    """One sentence for an error that the user can mend; nothing for a bug. The ``keys`` are those at the top."""
    links = [*chain(error)]
    is_expected = isinstance(error, EXPECTED) or type(error).__name__ == "MisconfigurationException"  # Lightning's
    told = next((link for link in links if isinstance(link, UserError | YAMLError)), None)
    if is_expected and told is not None:
        sentence = " ".join([one_line(told), *getattr(told, "__notes__", ())])
        return sentence if isinstance(told, UserError) else f"A configuration file is no valid YAML: {sentence}."
    frames = [frame for link in links for frame, _ in traceback.walk_tb(link.__traceback__)]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    functions = {frame.f_code.co_name for frame in frames}
    endless = any(isinstance(link, RecursionError) for link in links) and any(map(READERS.match, modules))
    if endless or "RecursionError raised while" in str(error):
        return "The configuration includes itself, or nests deeper than can be read: write it flatter."
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object!r} is not read as UTF-8: give it another name, or set PYTHONUTF8=1 if it should be."
    if is_out_of_memory(error):
        return explain_out_of_memory(error, functions)
    refused = next((link for link in links if type(link).__module__.partition(".")[0] in LOGGERS), None)
    if refused is not None and not isinstance(error, InstantiationException):
        return f"{one_line(refused)} (logger=default needs no account and no network)"
    mistyped = explain_override(error, keys)
    if mistyped is not None:
        return mistyped
    places = [link for link in links if isinstance(link, OSError)]
    place = next((link for link in places if link.errno in FULL or (link.errno in NAMED and link.filename)), None)
    if place is not None:
        name = repr(str(place.filename)) if place.filename else "A file of this run, or what it prints,"
        which = ", or read" if place.errno in NAMED else ""
        hint = " (--traceback shows where). If this run writes it, choose" if place.errno in NAMED else ". Choose"
        sentence = f"{name} cannot be written{which}: {place.strerror}{hint} another folder: {FOLDER_KEYS}."
        return " ".join([sentence, *getattr(error, "__notes__", ())])
    if any(link.errno == errno.ENOENT for link in places):  # without a name, that is of no file
        return "The current folder has been removed: change to another one (cd), and start again."
    if isinstance(error, InstantiationException):
        return explain_constructor(error)
    if functions & RESTORING:
        return (
            "The checkpoint of ckpt_path cannot be taken over, as its content is not what this version of Lightning "
            f"writes ({type(error).__name__}: {one_line(error)})."
        )
    own = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = own[-1] if own else ""
    if raised_in.startswith("torch.optim.") or "configure_optimizers" in functions:
        return (
            f"optimizer or lr_scheduler cannot work with what it is given ({one_line(error)}): --cfg job -p optimizer "
            "shows it (--traceback shows where)."
        )
    if any(name.startswith("lightning_ga.models") for name in own) and raised_in.startswith(("torch", "timm")):
        return (
            f"The model cannot take what it is given ({one_line(error)}): the keys of model, and data.image_size, "
            "data.channels or optimizer, have to fit each other (--traceback shows where)."
        )
    if not is_expected and not (isinstance(error, ValueError) and raised_in.startswith("hydra.")):  # of its options
        return None
    said = next((cause for cause in links if str(cause).strip()), error)
    if not isinstance(said, OmegaConfBaseException):
        return one_line(said)
    reason = str(said).split("\n")[0].rstrip(".")
    raised = re.match(r"(\w+) raised while resolving interpolation: (.+)", reason)
    reason = raised[2] if raised else reason
    if not said.full_key or (raised and raised[1] == "UserError"):
        return f"{reason}."
    return f"{said.full_key} has no value ({reason}): --cfg job shows what it is made of, or give {said.full_key}=…"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; not before torch is imported, which this does not do."""
    if "torch" not in sys.modules:
        return False
    from lightning_ga.memory import oom

    return oom.is_out_of_memory(error)


def explain_override(error: BaseException, keys: Sequence[str]) -> str | None:
    """What was typed, where Hydra finds no option or key of that name, or cannot read it."""
    if isinstance(error, OverrideParseException):  # ckpt_path=epoch=1.ckpt
        key, _, value = str(error.override).partition("=")
        if TYPESET.search(str(error.override)):
            return f"{error.override} holds quotes of a word processor, which are letters here: type ' and \" instead."
        quoted = value.replace("'", "").replace('"', "")
        return (
            f"{error.override} cannot be read: a value with signs such as = , : {{ }} [ ] ( ) or a blank is quoted "
            f"twice, for the shell and for Hydra: '{key}=\"{quoted}\"'"
        )
    if isinstance(error, MissingConfigException) and error.options:  # model=nope
        file = str(error.missing_cfg_file)  # an option may hold slashes
        group = re.match(r"((hydra/)?[^/]+)/|", file)[1] or ""  # type: ignore[index]
        option = file.removeprefix(f"{group}/")
        if group.startswith("hydra/") and option in PLUGINS:
            return f"{group}={option} needs a package that is not installed: pip install {PLUGINS[option]}"
        given, kind = (f"{group}={option}", "options") if group else (f"--config-name {option}", "names")
        options = ", ".join(name for name in error.options if not name.startswith("_"))
        return f"{given} does not exist{did_you_mean(option, error.options)} The {kind}: {options}."
    if isinstance(error, InterpolationKeyError):  # model=gpt with pictures
        wanted = re.search(r"'([^']+)'", str(error))
        reference = wanted[1] if wanted else "another key"
        return (
            f"{error.full_key} is read from {reference}, which the configuration does not have: choose another "
            f"{reference.partition('.')[0]}=… that has it, or give {error.full_key}=…"
        )
    text = str(error)
    if text.startswith("Error merging override ") and error.__cause__ is not None:
        return f"{text.removeprefix('Error merging override ')}: {one_line(error.__cause__)}."
    several = re.match(r"Ambiguous value for argument '([^=]+)=(.+)'\n", text)
    if several:
        return f"{several[1]}={several[2]} is several values: -m runs one after the other; a list is [{several[2]}]."
    unknown = re.match(r"Could not override '([^']+)'", text)
    return explain_key(unknown[1], error, keys) if unknown else None


def explain_key(key: str, error: BaseException, keys: Sequence[str]) -> str:
    """``trainer.max_epoch=3``: keys of that last name, or the nearest; of a section of this package, all there are."""
    section = parent_section(error)
    root: Any = {} if section is None else OmegaConf.to_container(section._get_root(), resolve=False)
    parent, _, name = key.rpartition(".")
    first = key.partition(".")[0]
    if first in keys and (section is None or first not in root):
        return f"The configuration that --config-name chose has no {first}: let its defaults begin with train."
    of_hydra = first == "hydra"
    known = [place for place, _ in walk(root) if place.rpartition(".")[0] and place.startswith("hydra.") == of_hydra]
    nearest = [place for place in (*keys, *known) if place.rpartition(".")[2] == name][:2]
    nearest = nearest or near(key, known if parent else keys)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
    if section is not None and not section and section._get_full_key(None) == first:
        without = WITHOUT.get(first, "null")
        return f"{key} sets a part of {first}, which is left out (as by {first}={without}): give one of the two."
    target = "" if section is None or "_target_" not in section else str(section._get_node("_target_"))
    if target.startswith("lightning_ga."):  # a section of this package's own classes shows every argument
        listed = ", ".join(sorted(str(name) for name in section if not str(name).startswith("_")))
        return f"There is no key {key}{hint} The keys of {parent}: {listed}."
    return f"There is no key {key}{hint}" + (f" To add a key of your own, write +{key}=VALUE." if parent else "")


def explain_constructor(error: InstantiationException) -> str:
    """A constructor that failed: whose, and why."""
    target = re.search(r"(?:call to target|locating target) '([^']+)'", str(error))
    key = re.search(r"full_key: (\S+)", str(error))
    cause = next((cause for cause in chain(error) if not isinstance(cause, HydraException)), error)
    name = f"{key[1]} ({target[1]})" if key and target else target[1] if target else "The configuration"
    if isinstance(cause, ModuleNotFoundError):
        package = cause.name or str(cause).partition("'")[2].partition(">")[0].partition("'")[0]  # wandb's names none
        return f"{name} needs a package that is not installed: pip install {package}"
    return f"{name} could not be built: {one_line(cause)} (--traceback shows where)"


def explain_out_of_memory(error: BaseException, functions: set[str]) -> str:
    """An out-of-memory error that nothing caught: what would, and what holds the memory, where that is known."""
    way_out = "leave accumulate=auto and accumulate.on_oom=split as they are by default, or use a smaller batch"
    if functions & BEFORE_DATA:
        way_out = "the model alone does not fit; use a smaller one, precision=bf16-true or a device with more memory"
    cause = next((cause for cause in chain(error) if not isinstance(cause, HydraException)), error)
    first = str(cause).strip().partition(". ")[0].rstrip(".")
    return " ".join([f"Memory ran out ({first}): {way_out}.", *getattr(error, "__notes__", ())])


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The end of a sentence: a full stop, or a suggestion."""
    nearest = near(name, names)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else "."


def near(name: str, names: Sequence[str]) -> list[str]:
    """At most two names that look like a name."""
    return get_close_matches(name, [str(known) for known in names], n=2, cutoff=0.6)


def parent_section(error: BaseException) -> Any:
    """The section in which an OmegaConf error could not find a key."""
    parents = (getattr(cause, "parent_node", None) for cause in chain(error))
    return next((parent for parent in parents if hasattr(parent, "keys")), None)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, from the outside in, but for those that ``raise … from None`` leaves out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def one_line(error: BaseException) -> str:
    """The first paragraph of a message, on one line; of what a loader's process raised, its last."""
    text = str(error)
    if re.match(r"Caught \w+ in DataLoader worker", text):
        text = text.rstrip().rpartition("\n")[2].partition(": ")[2]
    paragraph = inspect.cleandoc(text).split("\n\n")[0]
    return " ".join(paragraph.split()) or type(error).__name__
