"""What the documentation shows works as it stands there."""

import ast
import re
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pages
import pytest
from forks import forked

ROOT = pages.ROOT
PAGES = [*pages.pages(), ROOT / "README.md"]
KNOWN = ("pip", "source", "sudo", "apt-get", "dpkg-deb", "cd", "git", "eval")  # programs of others


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.runs for block in pages.blocks(page))], ids=name)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    done = forked(pages.run, page, folder=tmp_path)
    assert done.code == 0, done.output[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    remarks = {block.remark for block in pages.blocks(page) if block.language in ("python", "sh")} - {""}
    assert [remark for remark in remarks if not re.match(r"not run: \w+|printed$|file: \S+$", remark)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if [*pages.commands(page)]], ids=name)
def test_commands_exist(page: Path, command) -> None:
    """Overrides compose, and modules, files and make's targets are there."""
    for line in pages.commands(page):
        ours = re.search(r"(?:-m lightning_ga\.train|\blightning-ga)\b(.*)|make train ARGS=\"(.*)\"", line)
        if ours is not None:
            run = command("--cfg", "job", "--resolve", *composable(ours[1] or ours[2] or ""), "paths.output_dir=run")
            assert run.code == 0, f"{line}: {run.err}"
        else:
            assert is_there(shlex.split(line), page), line


def composable(arguments: str) -> list[str]:
    """Overrides; those of sweeps by their first values."""
    words = [word for word in shlex.split(arguments) if word != "-m"]
    return [re.sub(r"^([\w.]+=[^,{\[]+),.*", r"\1", word) for word in words]


def is_there(words: list[str], page: Path) -> bool:
    """Whether a command line names something that exists."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    program, *rest = words
    if program == "make":
        return re.search(rf"^{re.escape(rest[0])}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if program == "python" and rest[0] == "-m":
        return find_spec(rest[1]) is not None
    if program == "python":
        saved = {block.remark.removeprefix("file: ") for block in pages.blocks(page)}
        return rest[0] in saved or (ROOT / rest[0]).exists()
    return program in KNOWN or (ROOT / program).exists()


@cache
def sentences() -> str:
    """All text that the package holds, with … for what is filled in."""
    texts = []
    for path in sorted((ROOT / "lightning_ga").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"\{\w+\}", "…", node.value))
    return "\n".join(texts)


def test_messages_of_the_troubleshooting_page_are_those_of_the_package() -> None:
    page = (pages.DOCS / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(messages) > 10
    parts = {part.strip() for message in messages for part in message.split("…") if len(part.strip()) > 3}
    assert sorted(part for part in parts if part not in sentences()) == []


def test_the_page_about_the_engine_names_what_there_is() -> None:
    """Its files exist; its classes, methods and functions are defined in the package."""
    page = (pages.DOCS / "concepts" / "engine.md").read_text(encoding="utf-8")
    package = ROOT / "lightning_ga"
    files = re.findall(r"`(\w+/\w+\.py|\w+\.py)`", page)
    assert len(files) > 15
    assert [file for file in files if not (package / file).exists()] == []
    sources = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", page)
    assert len(methods) > 10
    names = {name for method in methods for name in method} | {*re.findall(r"`([A-Z]\w+)`", page)}
    assert [name for name in sorted(names) if not re.search(rf"^ *(class|def) {name}\b", sources, re.MULTILINE)] == []
