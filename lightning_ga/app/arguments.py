"""Put what was typed into the order that Hydra takes, and read from it what files must not decide."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_ga.errors import UserError

NEEDED = ("model", "data", "optimizer", "trainer", "precision", "paths")  # groups without which there is no run
HOME = re.compile(r"""(['"]?)~(?=/|\1$)""")
APART = re.compile(r"(?:^|\s)([^\s=]+)(?:\s+=\s*|=\s+)([^\s=]+)(?=\s|$)")  # key and value with blanks beside the =
WITHOUT = {"accumulate": "off", "logger": "none", "callbacks": "none", "lr_scheduler": "none"}


def check_arguments(arguments: Sequence[str], groups: Sequence[str]) -> None:
    """Refuse ``model=null`` and ``~model``, which leave out what a run needs, and what Hydra reads as nothing."""
    options, overrides = split_options(arguments)
    if any(option.startswith("--experimental-rerun") for option in options):
        raise UserError("--experimental-rerun unpickles a file, which can run any code: give the overrides again.")
    apart = APART.search(" ".join(overrides))
    if apart and any(not override.partition("=")[2] or " =" in override or "= " in override for override in overrides):
        raise UserError(f"{apart[0].strip()} has a blank beside the =: write {apart[1]}={apart[2]}.")
    for override in overrides:
        key, sign, value = override.partition("=")
        group = key.removeprefix("~")
        if group == key and not (key and sign):
            raise UserError(f"{override} is neither an option nor KEY=VALUE; --help shows both.")
        if group != key and group in NEEDED:
            raise UserError(
                f"{override} leaves a run without {group}, which it needs; --help lists the options of {group}."
            )
        if (key in groups or key.startswith("hydra/")) and value in ("", "null", "[]", "{}"):
            raise UserError(f"{override} chooses no option of {key}: {way_without(key)}; --help lists the options.")


def way_without(group: str) -> str:
    """What to write instead of no option."""
    if group in WITHOUT:
        return f"write {group}={WITHOUT[group]} to do without"
    return "a run needs one: leave this out" if group in NEEDED else "leave this out"


def options_first(arguments: Sequence[str]) -> list[str]:
    """Options before overrides: Hydra takes overrides in one piece only, and Lightning appends some for its ranks."""
    options, overrides = split_options(arguments)
    return [*options, *map(at_home, overrides)]


def at_home(override: str) -> str:
    """An override in which ``~`` is the home folder: no shell fills that in behind a =.

    Examples:
        >>> at_home("data.root=pictures~/x")
        'data.root=pictures~/x'
    """
    key, sign, value = override.partition("=")
    return f"{key}{sign}{HOME.sub(lambda found: found[1] + str(Path.home()), value)}" if HOME.match(value) else override


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options with their values, and overrides, told apart by Hydra's own parser."""
    overrides: list[str] = get_args_parser().parse_intermixed_args(list(arguments)).overrides
    return [argument for argument in arguments if argument not in overrides], overrides


def rank_overrides(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides for ranks that ``torchrun`` or ``srun`` has started: all but the first keep no folder of their own.

    Each process names its folder by its own clock. Ranks that Lightning starts are told the folder of the first.

    Examples:
        >>> rank_overrides(["trainer=ddp"], {"RANK": "1"})
        ['hydra.output_subdir=null', 'hydra/job_logging=none', 'hydra.run.dir=${paths.output_root}']
        >>> rank_overrides(["trainer=ddp"], {"RANK": "0"})
        []
    """
    if is_first_rank(environment):
        return []
    if any(argument.startswith(("hydra.output_subdir=", "hydra/job_logging=")) for argument in arguments):
        return []
    told = any(argument.startswith("hydra.run.dir=") for argument in arguments)
    folder = [] if told else ["hydra.run.dir=${paths.output_root}"]
    return ["hydra.output_subdir=null", "hydra/job_logging=none", *folder]


def is_first_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process is the only one, or the first of those that were started together."""
    names = ("RANK",) if "RANK" in environment else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return all(environment.get(name, "0") == "0" for name in names)


def typed_targets(arguments: Sequence[str]) -> tuple[str, ...]:
    """The packages that ``allow_targets=…`` names on the command line.

    A configuration cannot add to them: what may be built would then be decided by what is to be built.
    """
    typed = [argument for argument in split_options(arguments)[1] if argument.startswith("allow_targets=")]
    if not typed:
        return ()
    value = OverridesParser.create().parse_override(typed[-1]).value()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise UserError(f"{typed[-1]} must be a list of packages; for example allow_targets=[my_package].")
    return tuple(map(str, value))
