"""The samples a second of a rank, by a clock of the test."""

import pytest
import torch

from lightning_ga.probe import speed


class Clock:
    """Goes on when the test says so."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "clock", clock)
    return clock


def run_window(measured: speed.Speed, clock: Clock, seconds: float) -> None:
    """Work for so many seconds, half of them before ranks exchange a value; wait for long, and send twice."""
    measured.begin_window()
    clock.now += seconds / 2
    with measured.waiting():
        clock.now += 1000
    clock.now += seconds / 4
    measured.note_sending()
    clock.now += seconds / 4
    measured.note_sending()
    clock.now += 1000
    measured.end_window(12)


def test_waiting_is_not_counted(clock: Clock) -> None:
    measured = speed.Speed(torch.device("cpu"))
    for _ in range(speed.WINDOWS):
        assert not measured.is_measured
        run_window(measured, clock, 3.0)
    assert measured.is_measured
    assert measured.take() == 4.0
    assert not measured.is_measured


def test_a_few_slow_windows_change_nothing(clock: Clock) -> None:
    """Such as the first, in which a model is compiled, and one that measures exactness."""
    measured = speed.Speed(torch.device("cpu"))
    for number in range(speed.WINDOWS):
        run_window(measured, clock, 1000.0 if number < 5 else 3.0)
    assert measured.take() == 4.0


def test_a_window_begins_again_after_an_error(clock: Clock) -> None:
    measured = speed.Speed(torch.device("cpu"))
    measured.begin_window()
    clock.now += 1000
    run_window(measured, clock, 3.0)
    assert measured.take() == 4.0


def test_without_an_exchange_nothing_is_known(clock: Clock) -> None:
    measured = speed.Speed(torch.device("cpu"))
    measured.begin_window()
    clock.now += 1.0
    measured.end_window(12)
    assert measured.take() == 0.0
