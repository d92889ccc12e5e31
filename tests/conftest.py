"""Shared by all tests: one thread, so that sums have one order, quick collections, a command line, a run's mode.

Nothing heavy is imported here: the process that only hands tests to others begins with this file, too.
"""

import gc
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# Modules with tests of several seconds, or whose processes take several: they come first, so that no worker waits for
# the last of them in the end, and most of them share one server of forks.
LONG = {
    *("test_ranks", "test_ranks_memory", "test_ranks_survive", "test_setrlimit", "test_sharded", "test_terminal"),
    *("test_public", "test_examples", "test_survive", "test_train"),
}

settings.register_profile("quick", deadline=None, max_examples=30, derandomize=True)  # the same examples each time
settings.register_profile("thorough", deadline=None, max_examples=60)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--micro-batching",
        choices=("loader", "step"),
        default="loader",
        help="What AutoAccumulate(micro_batching=…) is wherever a test does not say.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with long tests. In step mode leave out those of the loader alone, which each mark explains.

    Tests of which a parameter says the mode are left out there, too: they do in either run what they do in the other.
    """
    if config.getoption("--micro-batching") == "step":
        for item in items:
            mark = item.get_closest_marker("loader_only")
            if mark is not None:
                item.add_marker(pytest.mark.skip(reason=f"loader mode only: {mark.kwargs['reason']}"))
        config.hook.pytest_deselected(items=[item for item in items if says_its_mode(item)])
        items[:] = [item for item in items if not says_its_mode(item)]
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.stem not in LONG))


def says_its_mode(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return any(parameters.get(name) in ("loader", "step") for name in ("mode", "micro_batching"))


@pytest.fixture
def micro_batching(request: pytest.FixtureRequest) -> str:
    """Where batches are cut in this run, unless a test says otherwise."""
    mode: str = request.config.getoption("--micro-batching")
    return mode


@pytest.fixture(autouse=True)
def _mode_of_the_run(micro_batching: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test that does not say where batches are cut use the mode of this run."""
    if micro_batching != "loader":
        from lightning_ga import AutoAccumulate

        monkeypatch.setitem(AutoAccumulate.__init__.__kwdefaults__, "micro_batching", micro_batching)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_clock() -> None:
    """Samples are looked at however slow a machine is."""
    from lightning_ga.loading import largest, sample_reader

    sample_reader.FIRST_SECONDS = largest.LOOK_SECONDS = float("inf")


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Every trial collects garbage: what was imported, and what is kept for other tests, is not looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Paths of folders that are not there yet; to let pytest make each would take longer than many tests."""
    root = tmp_path_factory.mktemp("caches")
    return (str(root / str(number)) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_cache(_caches: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test remembers the limits of another, or of the person who runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", next(_caches))


@dataclass(frozen=True)
class Typed:
    """What a command line did: exit code, what it printed, and the run's folder."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def mistake(self) -> str:
        """The one sentence that a mistake ends in."""
        assert self.code == 1
        (line,) = self.err.strip().splitlines()
        assert line.startswith("Error: ")
        return line


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Typed]]:
    """Type a command line in an empty folder, without starting a process."""
    import torch

    from lightning_ga.train import main

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", ["lightning-ga"])
    precision = torch.get_float32_matmul_precision()
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything leaves them behind
        monkeypatch.setenv(name, "0")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def type_line(*arguments: str, folder: str = "run") -> Typed:
        place = (
            [] if any(a.startswith(("-", "hydra.run.dir=")) for a in arguments) else [f"hydra.run.dir=outputs/{folder}"]
        )
        try:
            main([*arguments, *place])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        finally:
            for handler in [handler for handler in root.handlers if handler not in handlers]:
                root.removeHandler(handler)
                handler.close()
            root.handlers[:], root.level = handlers, level
        printed = capsys.readouterr()
        return Typed(code, printed.out, printed.err, work / "outputs" / folder)

    yield type_line
    torch.set_float32_matmul_precision(precision)
