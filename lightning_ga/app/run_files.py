"""The files of runs: one writer for all that a run leaves for people and programs, and one reader.

What is read may come from anybody: regular files alone, and no more of them than such a file holds.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml  # type: ignore[import-untyped] # it ships no types
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.errors import UserError, printable
from lightning_ga.plan.checkpoint import probe_or_none
from lightning_ga.plan.records import ProbeResult

Curve = list[tuple[int, float]]
OOM = "Memory ran out in"
CONFIG, EPOCHS, CURVES = "config.yaml", "epochs.json", "csv/metrics.csv"
PARTS = ("result.json", "plan.json", EPOCHS, "versions.json", "classification_report.json", "confusion_matrix.json")
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^}]*\}")  # it may be a secret, and a page is sent to others
A_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
MOST = 1_000_000  # characters of a configuration, its aliases written out
EACH = 10  # characters that a key, a value, a list or a mapping counts at least
DEEPEST = 50


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run by the files that it has left; what is not there is empty. Events are out-of-memory errors.

    Files that cannot be read, or are not there though every training writes them, are ``missing``.
    """

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    plan: Mapping[str, Any]
    result: Mapping[str, Any]
    versions: Mapping[str, Any]
    epochs: list[dict[str, Any]]
    curves: Mapping[str, Curve]
    scores: Mapping[str, Any]
    confusion: Mapping[str, Any]
    events: list[str]
    missing: list[str]

    @property
    def name(self) -> str:
        """The last two parts of the folder: the date and the time, or the sweep and the job."""
        return printable("/".join(self.folder.resolve().parts[-2:]))

    @property
    def probe(self) -> ProbeResult | None:
        """What the probe found; ``None`` where none ran, or one of another version."""
        return probe_or_none(self.plan.get("probe"))

    @property
    def samples_per_second(self) -> float | None:
        """Training samples a second in the fastest epoch, its validation included."""
        speeds = [epoch["samples"] / epoch["seconds"] for epoch in self.epochs if epoch["seconds"]]
        return max(speeds, default=None)


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder, as far as it can be read: its run may have been killed at any time."""
    if not any((folder / name).is_file() for name in (CONFIG, *PARTS)):
        raise UserError(
            f"{str(folder)!r} is no folder of a run: it holds no config.yaml. Give one such as outputs/DATE/TIME."
        )
    missing = [name for name in (CONFIG, *PARTS[:2]) if not (folder / name).is_file()]
    result, plan, epochs, versions, scores, confusion = (
        read_json(folder / name, [] if name == EPOCHS else {}, missing) for name in PARTS
    )
    return RunFiles(
        folder=folder,
        config=read_config(folder, missing),
        config_text=FROM_ENVIRONMENT.sub("***", text_of(folder / CONFIG)),
        plan=plan,
        result=result,
        versions=versions,
        epochs=epochs,
        curves=read_curves(folder / CURVES),
        scores=scores,
        confusion=confusion,
        events=[line[line.index(OOM) :] for line in text_of(folder / "train.log").splitlines() if OOM in line],
        missing=missing,
    )


def text_of(path: Path) -> str:
    """The text of a file, with signs in place of bytes that are not UTF-8; nothing where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_json(path: Path, default: Any, missing: list[str] | None = None) -> Any:
    """A JSON file of the default's kind (a mapping for ``None``), or the default; a broken one is in ``missing``."""
    with suppress(ValueError, RecursionError):  # torn, as when its run was killed
        content = json.loads(text_of(path))
        if isinstance(content, dict if default is None else type(default)):
            return content
    if missing is not None and path.is_file():
        missing.append(path.name)
    return default


def read_curves(path: Path) -> dict[str, Curve]:
    """Every logged number of a ``metrics.csv`` by optimizer step: name to ``[(step, value), …]``."""
    curves: dict[str, Curve] = {}
    with suppress(csv.Error):
        for row in csv.DictReader(text_of(path).splitlines()):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    with suppress(LookupError, TypeError, ValueError):  # half a row, where its run was killed
                        point = int(row["step"]), float(value)
                        curves.setdefault(name, []).append(point)
    return curves


def read_config(folder: Path, missing: list[str] | None = None) -> dict[str, Any]:
    """The configuration of a run; one that cannot be read is empty, and one that is there then ``missing``."""
    try:
        content = read_yaml(folder / CONFIG)
    except UserError:
        content = {}
        if missing is not None and CONFIG not in missing:
            missing.append(CONFIG)
    return content if isinstance(content, dict) else {}


def read_yaml(path: Path) -> Any:
    """What a YAML file holds, with its interpolations as they are written."""
    try:
        return OmegaConf.to_container(OmegaConf.create(checked_yaml(path) or "{}"))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError, AssertionError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}.") from error


def checked_yaml(path: Path) -> str:
    """The text of a YAML file that is no larger, and no deeper, than a configuration, its aliases written out."""
    if not path.is_file() or path.stat().st_size > MOST:
        raise UserError(f"{str(path)!r} is not a regular file of at most {MOST:,} bytes.")
    try:
        text = path.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        loader.name = str(path)  # for its errors
        size, depth = extent(loader.get_single_node(), {})
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8: save it in that encoding.") from error
    except RecursionError:
        size, depth = 0, DEEPEST + 1
    if text.startswith("\ufeff"):  # the first line, which names the package, would be no comment
        raise UserError(f"{str(path)!r} begins with a byte order mark: save it as UTF-8 without.")
    if size > MOST or depth > DEEPEST:
        raise UserError(
            f"{str(path)!r} is too large, with its aliases written out: a configuration has at most {MOST:,} "
            f"characters and {DEEPEST} levels."
        )
    return text


def extent(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Characters and levels of a YAML node; an alias is the node that it stands for, and known."""
    if id(node) not in known:
        known[id(node)] = MOST, DEEPEST  # of one that is within itself
        if isinstance(node, yaml.CollectionNode):
            parts = [part for one in node.value for part in (one if isinstance(one, tuple) else (one,))]
            sizes, depths = zip((0, 0), *(extent(part, known) for part in parts))
            known[id(node)] = EACH + sum(sizes), 1 + max(depths)
        else:
            known[id(node)] = EACH + len(getattr(node, "value", "")), 1
    return known[id(node)]


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """An open file; its folder is made if needed, and an error of a full disk, which names no file, names this one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text; bytes of names that are not UTF-8 become question marks."""
    with writing(path) as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, with null for numbers that are not finite, which JSON lacks."""
    write_text(path, json.dumps(finite(content), indent=2, ensure_ascii=False) + "\n")


def finite(content: Any) -> Any:
    """The content with null for numbers that are not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_table(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write CSV in which a spreadsheet finds nothing to run, and a terminal nothing to obey."""
    with writing(path) as file:
        csv.writer(file).writerows([as_cell(value) for value in row] for row in rows)


def as_cell(value: Any) -> Any:
    """A cell; a text that a spreadsheet would take for a formula begins with a quote."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    is_formula = text.lstrip().startswith(("=", "+", "-", "@")) and not A_NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text
