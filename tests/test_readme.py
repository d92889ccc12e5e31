"""What stands in README.md and docs/probe.md to be copied works."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, PROBE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/probe.md"))


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def command_lines(page: str = README) -> list[str]:
    """The arguments of every command line of ours, made by make or typed."""
    unbroken = [re.sub(r"\\\n\s*", "", block) for block in blocks("sh", page)]
    lines = [line.split("  #")[0].strip() for block in unbroken for line in block.splitlines()]
    typed = [
        line.partition("lightning_ga.train ")[2] for line in lines if line.startswith("python -m lightning_ga.train")
    ]
    made = [match[1] for line in lines if (match := re.match(r'make train ARGS="(.*)"', line))]
    return [*typed, *made]


@pytest.mark.filterwarnings("ignore:.*_dataloader.* has:UserWarning")
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python_blocks_run(code: str, monkeypatch, tmp_path, capsys, caplog):
    """As they are printed."""
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "within 0" not in caplog.text
    assert "43, 43, 42" in capsys.readouterr().out or "AutoAccumulate(" in code


@pytest.mark.parametrize("code", blocks("python", PROBE), ids=lambda code: code.splitlines()[1])
def test_python_blocks_about_the_probe_run(code: str, capsys):
    """As they are printed, and they print."""
    exec(compile(code, "probe.md", "exec"), {"__name__": "probe"})
    assert re.search("replay 4|Live tensors out of memory.* 1048576", capsys.readouterr().out)


@pytest.mark.parametrize("page", [README, PROBE], ids=["README.md", "probe.md"])
def test_links_lead_somewhere(page: str):
    """To files of this repository."""
    folder = ROOT if page is README else ROOT / "docs"
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", page)]
    assert [target for target in targets if target and "://" not in target and not (folder / target).exists()] == []


@pytest.mark.parametrize("line", [*command_lines(), *command_lines(PROBE)])
def test_command_lines_compose(line: str, command):
    """Every override exists; sweeps are composed by their first values."""
    arguments = [re.sub(r"^([\w.]+=[^,{]+),.*", r"\1", part) for part in shlex.split(line) if part != "-m"]
    run = command("--cfg", "job", "--resolve", *arguments, "paths.output_dir=run")
    assert run.code == 0, run.err


def test_the_small_device_gives_the_same_result(command):
    """The two commands of the second chapter end with the same numbers."""
    whole, small = (line for line in command_lines() if line.startswith("trainer=cpu model=mlp data.batch_size=256"))
    results = []
    for name, line in (("whole", whole), ("small", small)):
        run = command(*line.split(), folder=name)
        assert run.code == 0, run.err
        results.append([float(x) for x in re.search(r"test/acc (\S+), test/loss (\S+),", run.out).groups()])
    assert results[0] == pytest.approx(results[1], rel=2e-3)  # rounding: sums have another order
    assert "256 = 86 + 85 + 85, factor 3" in run.out
    assert "119 samples per micro-batch" in run.out
    shown = re.search(r"```\n( training .*?)```", README, flags=re.DOTALL)[1]
    seconds = re.compile(r"\d+\.\d s \(")
    told = "\n".join(line.removeprefix(" ").rstrip() for line in run.out.splitlines())
    assert seconds.sub("", shown) in seconds.sub("", told)
