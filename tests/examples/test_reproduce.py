"""Recipes run row by row, go on where they were ended, and the pages show what the records hold."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.reproduce import __main__ as program
from examples.reproduce import mnist_mlp, pages, run
from examples.reproduce.recipe import MOST_POINTS, Column, Measured, Setup, Task, read_result
from examples.reproduce.windows import gradient_share, train_window
from lightning_ga.models import MLPClassifier

SETUP = Setup("quick", "nowhere")


def recipe(measured: list[str], names: str, **settings: object) -> SimpleNamespace:
    """Rows that note that they are measured; ``x`` is one that fails."""

    def measure(name: str) -> Measured:
        if name == "x":
            raise KeyboardInterrupt
        measured.append(name)
        return Measured({"loss": 0.12345, "kind": None}, {"train": [(1, 2.0)]})

    return SimpleNamespace(
        NAME="toy",
        TITLE="Toy",
        COLUMNS={"loss": Column("loss", "{:.2f}"), "kind": Column("kind")},
        data_used=lambda setup: "nothing",
        rows=lambda setup: [Task(name, settings, lambda folder, name=name: measure(name)) for name in names],
    )


def test_a_run_that_was_ended_goes_on_at_its_row(tmp_path: Path) -> None:
    """What was measured with the same settings stays; all else is measured again."""
    measured: list[str] = []
    reproduce = lambda *arguments, **rest: run.reproduce(  # noqa: E731
        recipe(measured, *arguments, **rest), SETUP, tmp_path, tell=lambda _: None
    )
    with pytest.raises(KeyboardInterrupt):
        reproduce("abxc", epochs=(1, 2))
    result = reproduce("abdc", epochs=(1, 2))
    assert measured == [*"abdc"]
    assert [row.name for row in result.rows] == [*"abdc"]
    assert result.command == "python -m examples.reproduce toy --quick"
    reproduce("abdc", epochs=(1, 3))
    assert measured == [*"abdc", *"abdc"]


@pytest.mark.parametrize("name", program.NAMES)
def test_pages_show_the_numbers_of_records_that_are_of_the_rows_that_there_are(name: str) -> None:
    page = (pages.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert f"<!-- recipe: {name} -->" in page
    assert pages.filled(page) == page
    assert (pages.PICTURES / f"{name}.png").is_file()
    assert f"../images/recipes/{name}.png" in page
    chosen = program.load(name)
    for scale in ("quick", "medium"):
        result = read_result(pages.RESULTS / scale / f"{name}.json")
        assert result is not None
        assert [row.name for row in result.rows] == [task.name for task in chosen.rows(Setup(scale, "nowhere"))]
        assert {key for row in result.rows for key in row.values} <= set(chosen.COLUMNS)
        assert max((len(curve) for row in result.rows for curve in row.curves.values()), default=0) <= MOST_POINTS
    chosen.draw(result)


def test_the_share_of_a_gradient() -> None:
    """Means that are added up weigh as many times too much as there are; ours weighs 1, in unequal parts too."""
    torch.manual_seed(0)
    net = MLPClassifier((16,)).net
    window = [(torch.rand(size, 1, 28, 28), torch.arange(size)) for size in (3, 3, 1)]
    for images, targets in window[:2]:
        torch.nn.functional.cross_entropy(net(images), targets).backward()
    assert gradient_share(net, window[:2]) == pytest.approx(2)
    whole = tuple(torch.cat(parts) for parts in zip(*window))
    train_window(net, torch.optim.SGD(net.parameters(), lr=0.0), whole, (3, 3, 1))
    assert gradient_share(net, window) == pytest.approx(1)


DIGITS = ("data=digits", "data.val_fraction=0.9", "trainer.max_epochs=1", "lr_scheduler=none", "optimizer=sgd")
CUT = ("experiment=mnist_mlp_accumulate4", *DIGITS, "optimizer.momentum=0", "trainer.limit_val_batches=0")


@pytest.mark.slow
def test_ours_gives_every_window_its_mean(tmp_path: Path) -> None:
    found = mnist_mlp.ours(tmp_path, [*CUT, "optimizer.lr=0.01", "optimized_metric=train/loss"])
    assert (found.values["full"], found.values["ragged"]) == pytest.approx((1, 1), rel=1e-4)
