"""Recipes run row by row, go on where they were ended, and the pages show what the records hold."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # examples are not installed

from examples.reproduce import __main__ as program  # noqa: E402
from examples.reproduce import mnist_mlp, pages, run  # noqa: E402
from examples.reproduce.recipe import Column, Measured, Setup, Task, read_result  # noqa: E402
from examples.reproduce.windows import gradient_share, train_window, window_peak  # noqa: E402
from lightning_ga.models import MLPClassifier  # noqa: E402

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
def test_pages_show_the_numbers_of_their_records(name: str) -> None:
    """Written by ``python -m examples.reproduce.pages``."""
    page = (pages.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert f"<!-- recipe: {name} -->" in page
    assert pages.filled(page) == page
    assert (pages.PICTURES / f"{name}.png").is_file()
    assert f"../images/recipes/{name}.png" in page


@pytest.mark.parametrize("scale", ["quick", "medium"])
@pytest.mark.parametrize("name", program.NAMES)
def test_records_are_of_the_rows_that_there_are(name: str, scale: str) -> None:
    """A recipe that has changed has to be run again."""
    chosen = program.load(name)
    result = read_result(pages.RESULTS / scale / f"{name}.json")
    assert result is not None
    assert [row.name for row in result.rows] == [task.name for task in chosen.rows(Setup(scale, "nowhere"))]
    assert {key for row in result.rows for key in row.values} <= set(chosen.COLUMNS)
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


def test_the_peak_of_a_window() -> None:
    """Smaller micro-batches take less; a budget below the peak does not do."""
    make = torch.optim.Adam
    whole, cut = (window_peak(MLPClassifier().net, make, sizes, (1, 28, 28)) for sizes in ((2048,), (256,) * 8))
    assert cut < whole
    with pytest.raises(torch.OutOfMemoryError):
        window_peak(MLPClassifier().net, make, (2048,), (1, 28, 28), budget=int(cut * 2**20))


DIGITS = ("data=digits", "data.val_fraction=0.8", "trainer.max_epochs=2", "lr_scheduler=none", "optimizer=sgd")
CUT = ("experiment=mnist_mlp_accumulate4", *DIGITS, "optimizer.momentum=0", "trainer.limit_val_batches=0")


def test_summed_means_are_a_larger_learning_rate(tmp_path: Path) -> None:
    """Four means of a window count four times, the one mean of a flushed window once: or divided, a quarter."""
    summed, divided, faster = (
        mnist_mlp.usual(tmp_path, [*CUT, f"optimizer.lr={rate}"], divide=divide)
        for rate, divide in ((0.01, False), (0.01, True), (0.04, True))
    )
    assert (summed.values["full"], summed.values["ragged"]) == pytest.approx((4, 1), rel=1e-4)
    assert (divided.values["full"], divided.values["ragged"]) == pytest.approx((1, 0.25), rel=1e-4)
    assert summed.values["loss"] == pytest.approx(faster.values["loss"], rel=1e-4)
    assert summed.values["loss"] < divided.values["loss"]


def test_ours_gives_every_window_its_mean(tmp_path: Path) -> None:
    """The flushed one too."""
    found = mnist_mlp.ours(tmp_path, [*CUT, "optimizer.lr=0.01", "optimized_metric=train/loss"])
    assert (found.values["full"], found.values["ragged"]) == pytest.approx((1, 1), rel=1e-4)
