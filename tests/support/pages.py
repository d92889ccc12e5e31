"""The pages of the documentation: their blocks of code, and a run of those in Python.

A comment on the line before a block says what is special about it:

- ``<!-- not run: REASON -->``: it needs what the tests do not have.
- ``<!-- printed -->``: lines that the blocks since the last such comment print, in this order.
- ``<!-- file: NAME -->``: the reader saves it under this name.
"""

import contextlib
import io
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)```(\w+)?[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_REMARK = re.compile(r"<!-- ([^>]+?) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int
    remark: str

    @property
    def runs(self) -> bool:
        return self.language == "python" and not self.remark.startswith("not run: ")


def pages() -> list[Path]:
    """All pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [_block(text, found) for found in _FENCE.finditer(text)]


def _block(text: str, found: re.Match[str]) -> Block:
    remark = _REMARK.search(text, 0, found.start())
    line = text.count("\n", 0, found.start()) + 1
    return Block(found[2] or "", textwrap.dedent(found[3]), line, remark[1] if remark else "")


def commands(page: Path) -> Iterator[str]:
    """The command lines of a page, comments and prompts left out."""
    for block in blocks(page):
        if block.language == "sh" and not block.text.startswith("#!") and not block.remark.startswith("not run: "):
            for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                if command := line.split("  #")[0].strip():
                    yield command


class Yours(pl.LightningModule):
    """The model of somebody who reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def run(page: Path) -> None:
    """Run the Python blocks of a page in one namespace; they print what stands below them."""
    data = TensorDataset(torch.randn(128, 8), torch.randint(4, (128,)))
    namespace: dict[str, Any] = {"__name__": "page", "model": Yours(), "dataset": data}
    namespace["loader"] = DataLoader(data, batch_size=32)
    printed = io.StringIO()
    for block in blocks(page):
        if block.runs:
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        elif block.remark == "printed":
            check_printed(block.text.splitlines(), printed.getvalue().splitlines(), page)
            printed = io.StringIO()


def check_printed(expected: list[str], lines: list[str], page: Path) -> None:
    """Lines stand in an output in their order; others may be between them."""
    rest = iter(lines)
    for line in expected:
        assert any(line == other for other in rest), f"{page.name} says {line!r}, and this was printed:\n{lines}"
