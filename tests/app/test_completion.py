"""What the shell offers behind ``KEY=``."""

from pathlib import Path

import pytest

from lightning_ga.app.completion import values_of


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("task=", "task=fit task=predict task=test task=validate"),
        ("task=t", "task=test"),
        ("accumulate.on_oom=", "accumulate.on_oom=raise accumulate.on_oom=split"),
        ("compile=ma", "compile=max-autotune compile=max-autotune-no-cudagraphs"),
        ("seed=", ""),
        ("tas", ""),
    ],
)
def test_choices_are_offered(word: str, offered: str) -> None:
    """Those that the table of values allows; nothing for numbers and keys."""
    assert " ".join(values_of(word)) == offered


def test_files_are_offered_where_a_path_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside best and last; below the home folder as it was typed, which the shell compares with."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "my last.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert values_of("ckpt_path=") == ["ckpt_path=best", "ckpt_path=last", "ckpt_path=runs/"]
    assert values_of("ckpt_path=runs/a/m") == ["ckpt_path=runs/a/my last.ckpt"]
    assert values_of("model.init_from=~/r") == ["model.init_from=~/runs/"]
    assert values_of("paths.data_dir=./") == ["paths.data_dir=./runs/"]


def test_the_shell_is_answered(command, monkeypatch) -> None:
    """Through Hydra's own completion, which still answers all else."""
    for line, answer in (
        ("model=mlp task=v", "task=validate"),
        ("data.batch", "data.batch_size="),
        ("model=g", "model=gpt"),
    ):
        monkeypatch.setenv("COMP_LINE", f"lightning-ga {line}")
        assert command("-sc", "query=bash").out.strip() == answer
