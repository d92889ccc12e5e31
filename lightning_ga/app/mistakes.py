"""A mistake in one sentence: the package's own, else the message of the library that found it."""

import inspect
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightning_ga.app.other_tools import OWN_KEYS, PLUGINS, WORDS, config_folder, in_our_words
from lightning_ga.errors import UserError

LONGEST = 600  # signs of a library's message: names of weights may be many
ARGUMENTS = (  # of AutoAccumulate, as its messages name them
    *("effective_batch_size", "micro_batch_size", "max_micro_batch_size", "micro_batch_multiple", "objective"),
    *("memory_budget", "normalize", "micro_batching", "on_oom", "batch_norm", "whole", "size_of", "checkpoint"),
    *("scale_lr", "verify", "cache", "shares"),
)
REMEDIES = {  # what libraries say without a way out
    r"No supported \w+ backend found": "use trainer.accelerator=auto, which takes what there is, or trainer=cpu.",
    r"does not support sparse gradients": "use optimizer=adagrad, or model.sparse=false.",
    r"machine only has": "use trainer.devices=1, or trainer.devices=auto for all there are.",
}


def explain(
    error: BaseException, overrides: Sequence[str] = (), groups: Mapping[str, Sequence[str]] | None = None
) -> str:
    """One sentence for an error; it names the mistyped one of the ``overrides``, and options of ``groups``."""
    links = [*chain(error)]
    own = (link for kind in (UserError, OmegaConfBaseException) for link in links if isinstance(link, kind))
    said = next(own, error)
    key = str(getattr(said, "full_key", None) or "")
    text = of_line(error, said, overrides, groups or {})
    if text is None:
        text = of_run(error, said, links, overrides)
    for group in ("model", "data"):
        named = [word.partition("=")[2] for word in overrides if word.startswith(f"{group}._target_=")]
        has_no_such = text.startswith(f"{group}.") and "unexpected keyword" in text
        if named and (key.startswith(f"{group}.") or has_no_such) and f"{group}=own" not in overrides:
            text += f" {group}._target_ alone keeps the keys of the {group} that is chosen: add {group}=own."
    return " ".join([text, *(note for link in links for note in getattr(link, "__notes__", ()))])


def of_run(error: BaseException, said: BaseException, links: Sequence[BaseException], overrides: Sequence[str]) -> str:
    """A sentence about what classes say: the package's own is printed whole, because its end is the remedy."""
    key = str(getattr(said, "full_key", None) or "")
    if isinstance(said, UserError):
        return on_the_line(" ".join(str(said).split()))
    if isinstance(said, OmegaConfBaseException):
        text = f"{key}: {one_line(said)}" if key else one_line(said)
        if isinstance(said, MissingMandatoryValue):
            return f"{text}: give {key}=VALUE."
        return text
    if isinstance(error, InstantiationException):
        target = re.search(r"'([^']+)'", str(error))
        cause = next((link for link in links if not isinstance(link, HydraException)), error)
        name = target[1] if target else "A class"
        text = f"{name} could not be built: {one_line(cause)} (--traceback shows where)"
        return of_values(text, overrides)
    if isinstance(said, HydraException):
        return one_line(said)
    lacking = re.search(r"(\w+)\.__init__\(\) missing \d+ required .*?: (.*)", str(error))
    if lacking:  # of a partial, which is called in training
        section = next((word.partition("=")[0].lstrip("+") for word in overrides if lacking[1] in word), None)
        if section:
            added = f"add +{section}.NAME=VALUE"
        else:
            added = f"add it where _target_ is {lacking[1]}"
        return f"{lacking[1]} needs {lacking[2]}, which its section does not give: {added}."
    weights = re.search(r"Error\(s\) in loading state_dict for (\w+):\s*(.*)", str(error))
    state = re.search(r"loaded state dict (contains|has) ", str(error))  # of an optimizer
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    is_of_optimizer = isinstance(error, KeyError) and any(
        "torch/optim" in Path(one.filename).as_posix() for one in frames
    )
    if weights or state or is_of_optimizer:
        given = next((word for word in overrides if word.startswith("ckpt_path=")), "The checkpoint")
        text = "another optimizer or schedule"
        if weights:
            text = f"another model than this {weights[1]} ({shorten(weights[2], 150)})"
        return (
            f"{given} is of {text}: choose model, data, optimizer and lr_scheduler as the config.yaml of its run does."
        )
    cause = next((link for link in links if isinstance(link, OSError)), error)  # torch hides a full disk
    return of_values(f"{type(cause).__name__}: {one_line(cause)} (--traceback shows all)", overrides)


def of_values(text: str, overrides: Sequence[str]) -> str:
    """The message of a library, after the typed values that it names, and with a way out where that is known."""
    for message, remedy in REMEDIES.items():
        if re.search(message, text):
            text = f"{text.partition(' (--traceback')[0]}: {remedy}"
    typed = [word.lstrip("+") for word in overrides if re.match(r"\+*[\w.]+\.\w+=", word)]
    named = [word for word in typed if is_named(word, text)]
    return f"{', '.join(named)}: {text}" if named else text


def is_named(word: str, text: str) -> bool:
    """Whether a message names the value of an override, or the last part of its key."""
    key, _, value = word.partition("=")
    name = key.rpartition(".")[2]
    found = [one for one in (name, value) if len(one) > 2 or one.startswith("-")]
    return any(re.search(rf"(?<![\w.-]){re.escape(one)}(?!\w)", text, re.IGNORECASE) for one in found)


def of_line(
    error: BaseException, said: BaseException, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> str | None:
    """A sentence about the override that cannot be read, or that names no option or key."""
    text = str(error)
    if isinstance(error, OverrideParseException) and re.match(r"\S+=", str(error.override)):  # ckpt_path=epoch=1.ckpt
        return of_value(str(error.override), text)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # model=nope
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        first, _, rest = str(error.missing_cfg_file).partition("/")
        if first in groups:
            group = first
            option = rest
        return of_option(group, option, error.options or groups.get(group, ()), groups)
    ambiguous = re.match(r"Ambiguous value for argument '(([^=]+)=(.*))'\n", text)
    if ambiguous:
        word, key, values = ambiguous.groups()
        return f"{word} has several values: add -m to run each of them, or write '{key}=[{values}]' for a list."
    if "Config group override must be" in text:  # precision=16
        for word in overrides:
            group, _, value = word.lstrip("+").partition("=")
            option = OmegaConf.from_dotlist([f"value={value}"])["value"]
            if group in groups and not isinstance(option, str | ListConfig):
                return f"{word} names no option. There are: {', '.join(groups[group])}."
    repeated = re.match(r"Multiple values for (\w+)\.|(\w+) appears more than once", text)  # +experiment=mine
    if repeated:
        group = repeated[1] or repeated[2]
        remedy = f"write {group}=OPTION, without a +, or in a file override /{group}."
        return f"{group} is among the defaults already: {remedy}"
    if isinstance(said, InterpolationKeyError) and said.full_key:
        return of_reference(str(said.full_key), str(said), groups)
    unknown = re.match(r"Could not override '([^']+)'", text)
    if unknown is None:
        return None
    words = (word.partition("=") for word in overrides)
    value = next((value for key, _, value in words if key.lstrip("+~") == unknown[1]), "VALUE")
    return of_key(unknown[1], value, said, groups)


def of_value(word: str, text: str) -> str:
    """A value that Hydra cannot read: it is taken for a function, a bracket or quote is open, or it needs quotes."""
    key, _, value = word.partition("=")
    plain = f"{re.sub(r'[.]+', '.', key).strip('.')}={value.strip('=,')}"
    if ".." in key or key.endswith(".") or value.startswith("=") or re.fullmatch(r"[\w.-]+,", value):
        return f"{word} cannot be read: write {plain}."
    function = re.search(r"Unknown function '(\w+)'", text)
    if function:
        return f"{word} cannot be read: a function is written as '{key}={{_target_:{function[1]},ARGUMENT:VALUE}}'."
    for begin, end in ("[]", "{}", "()"):
        lacks = value.count(begin) - value.count(end)
        if lacks:
            if lacks > 0:
                lacking = end
                whole = f"{word}{end}"
            else:
                lacking = begin
                whole = f"{key}={begin}{value}"
            return f"{word} lacks a {lacking}: write '{whole}', in quotes because of the shell."
    if value.count("'") % 2 or value.count('"') % 2:
        return f"{word} has a quote that is not closed: close it, or leave it out."
    return f"{word} cannot be read: a value with signs such as = or , is quoted twice: '{key}=\"{value}\"'"


def of_option(group: str, option: str, options: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    """An option that does not exist: those that do, or the plugin of Hydra that has it."""
    plugin = PLUGINS.get(f"{group}/{option}")
    if plugin is not None:
        return f"{group}={option} belongs to a plugin of Hydra: {plugin}."
    ours = in_our_words(group, option, groups) or ""
    of_timm = ""
    if ours.startswith(f"{group}=timm"):
        of_timm = f" If it is one of timm, write {ours}."
    if not group:
        return f"{option}.yaml is in no folder of configurations: leave --config-name out, or add --config-dir FOLDER."
    if "/" in option and group == "data":
        of_timm = f" For pictures, write data=image_folder data.root={option}."
    listed = ", ".join(one for one in options if not one.startswith("_")) or "none"
    return f"{group}={option} does not exist. There are: {listed}.{of_timm}"


def of_reference(key: str, text: str, groups: Mapping[str, Sequence[str]]) -> str:
    """A value that is taken from a key which does not exist, such as one of another data set."""
    found = re.search(r"Interpolation key '([^']+)' not found", text)
    needed = found[1] if found else "another key"
    section, _, name = needed.partition(".")
    folder = config_folder() / section
    having = []
    for option in groups.get(section, ()):
        text = (folder / f"{option}.yaml").read_text("utf-8")
        for base in re.findall(r"^  - (\w+)$", text, re.MULTILINE):
            text += (folder / f"{base}.yaml").read_text("utf-8")
        if re.search(rf"^{name}:", text, re.MULTILINE):
            having.append(option)
    if having:
        remedy = f"add {section}={' or '.join(having)}"
    else:
        remedy = f"add +{needed}=VALUE"
    return f"{key} is taken from {needed}, which is not there: {remedy}, or set {key}=VALUE."


def of_key(key: str, value: str, said: Any, groups: Mapping[str, Sequence[str]]) -> str:
    """A key that does not exist: what other programs mean by it, or the nearest name, or how it is added."""
    section: Any = getattr(said, "parent_node", None)
    known = [*map(str, section)] if OmegaConf.is_dict(section) else []
    missing = str(getattr(said, "full_key", None) or key)
    if missing.startswith(f"{key}."):  # in a mapping, which Hydra merges into the one that is there
        listed = ", ".join(known) or "no keys"
        remedy = f"to replace it, write '~{key}' '+{key}={value}'"
        return f"{key} has no {missing.removeprefix(f'{key}.')}, but {listed}: {remedy}."
    parent, _, name = missing.rpartition(".")
    if parent in ("callbacks", "logger") and name in groups.get(parent, ()):
        return f"There is no {missing}: choose it by {parent}=[default,{name}]."
    if key in OWN_KEYS or key in groups:
        return f"Your train.yaml does not have {key}, which is read here: write +{key}={value}."
    target = str(section.get("_target_", "")) if known else ""
    is_own = bool(target) and target.partition(".")[0] not in ("lightning", "lightning_ga", "torch")
    is_inner = "." in parent and bool(known)  # of an optimizer of one's own, or of a callback
    ours = None
    if not (is_own or (is_inner and key not in WORDS)):
        ours = in_our_words(key, value, groups)
    if ours is not None and re.match(rf"\w+\.{key}=[^ ]*$", ours):  # max_epochs of trainer
        ours = None
    nearest = nearest_key(key, missing, section if known else dict.fromkeys(groups))
    if ours is None and nearest is None and not is_own and not is_inner and name != "name":
        ours = in_our_words(key.rpartition(".")[2], value, groups)
    if ours is not None and ours != f"{key}={value}":
        return f"There is no key {key}: write {ours}."
    hint = f"; did you mean {nearest}?" if nearest else "."
    if target:
        return f"There is no key {key}{hint} If {target.rpartition('.')[2]} takes {name}, write +{key}={value}."
    if nearest:
        return f"There is no key {key}{hint}"
    place = f" to {parent}" if parent else ", for files of your own"
    return f"There is no key {key}{hint} +{key}={value} adds it{place}."


def nearest_key(key: str, missing: str, section: Mapping[Any, Any]) -> str | None:
    """The nearest key: of the section, or of all sections if ``missing`` is at the top, by its last part alone too."""
    parent, _, name = missing.rpartition(".")
    names = {str(one): f"{parent}.{one}".lstrip(".") for one in section}
    if not parent:  # lr, batch_size, max_epochs
        top = names
        names = {}
        for group, content in section.items():
            if OmegaConf.is_dict(content) and group != "hydra":
                names |= {str(one): f"{group}.{one}" for one in content}
                names |= {f"{group}.{one}": f"{group}.{one}" for one in content}
        of_top = []
        if key == name and key not in names:
            of_top = get_close_matches(key, top, n=1, cutoff=0.7)
        names |= {one: top[one] for one in of_top}
        name = of_top[0] if of_top else key
    nearest = get_close_matches(name, names, n=1, cutoff=0.7)
    return names[nearest[0]] if nearest else None


def on_the_line(text: str) -> str:
    """A sentence of the callback, with its arguments as keys of this command line."""
    text = re.sub(r"(?<![\w.])whole=\((.*?),?\)", r"whole=[\1]", text)
    text = text.replace("give the right key=…", "name it, as in 'accumulate.normalize={_target_:TargetTokens,key:1}'")
    text = re.sub(r"lightning_ga\.weights\.(\w+)\(\)", r"\1", text)
    text = re.sub(r"(?<![\w.])accumulate=(?=[\d{])", "accumulate.accumulate=", text)
    text = re.sub(r"(?<![\w.])every=", "checkpoint_every=", text)  # of CheckpointEvery
    return re.sub(rf"(?<![\w.])({'|'.join(ARGUMENTS)})(?==)", r"accumulate.\1", text)


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
    lines = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f"{line.line} ({Path(line.filename).name}, line {line.lineno})" for line in lines)
    return shorten(paragraph, LONGEST, placeholder=" …") or where or type(error).__name__
