import csv
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_ga import UserError
from lightning_ga.app.run_files import checked_yaml, read_json, read_run, read_yaml, write_json, write_table, write_text
from lightning_ga.errors import printable

NOT_UTF8 = b"caf\xe9".decode("utf-8", "surrogateescape")


def test_a_spreadsheet_finds_nothing_to_run_in_a_table(tmp_path):
    cells = ["=1+1", "+x", "-x", "@x", " =1", "-1.5", "+2e3", "x=1", "a\x1b[2Jb", "a\nb", NOT_UTF8, -3, 0.5, None]
    write_table(tmp_path / "x.csv", [cells])
    with (tmp_path / "x.csv").open(newline="") as file:
        (row,) = csv.reader(file)
    quoted = ["'=1+1", "'+x", "'-x", "'@x", "' =1", "-1.5", "+2e3", "x=1"]
    assert row == [*quoted, r"a\x1b[2Jb", r"a\nb", "caf\ufffd", "-3", "0.5", ""]


def test_names_that_are_not_utf8_are_written(tmp_path):
    write_text(tmp_path / "a" / "x.txt", NOT_UTF8)
    assert (tmp_path / "a" / "x.txt").read_text() == "caf?"
    write_json(tmp_path / "x.json", {NOT_UTF8: float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"caf?": None}


@pytest.mark.parametrize("write", [write_text, write_json, lambda path, text: write_table(path, [[text]])])
def test_a_full_disk_is_told_with_the_name_of_the_file(write):
    """The system names none."""
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write(Path("/dev/full"), "x")


def test_a_text_from_anywhere_does_nothing_to_a_terminal():
    assert printable("\x1b]0;x\x07\x9b\u202ecba\r\n") == r"\x1b]0;x\x07\x9b\u202ecba\r\n"
    assert printable("Ärger 犬 🐕 – “x”") == "Ärger 犬 🐕 – “x”"


def test_what_a_killed_run_has_left_is_read(tmp_path):
    """Half a file is missing, half a row is left out."""
    OmegaConf.save(OmegaConf.create({"data": {"root": "${oc.env:TOKEN}/x"}}), tmp_path / "config.yaml")
    (tmp_path / "result.json").write_text('{"test/acc": 0.')
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_bytes(b"step,train/loss\n0,1.5\n1,0.5,9,9\nx,1\n2,\xff\n3,0.2\n4")
    run = read_run(tmp_path)
    assert run.curves == {"train/loss": [(0, 1.5), (1, 0.5), (3, 0.2)]}
    assert (run.result, run.missing) == ({}, ["plan.json", "result.json"])
    assert "***/x" in run.config_text
    assert "TOKEN" not in run.config_text
    (tmp_path / "config.yaml").write_text("data: {root")
    assert read_run(tmp_path).missing == ["plan.json", "result.json", "config.yaml"]
    (tmp_path / "config.yaml").write_text("3")
    assert read_run(tmp_path).missing == ["plan.json", "result.json", "config.yaml"]
    (tmp_path / "csv" / "metrics.csv").write_text("no step\n1\n")
    assert read_run(tmp_path).curves == {}
    (tmp_path / "config.yaml").unlink()
    assert read_run(tmp_path).missing == ["config.yaml", "plan.json", "result.json"]


def test_aliases_count_as_what_they_stand_for(tmp_path):
    """A few that repeat a section are what they are for; those that double each other are refused at once."""
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {b: [1, 2], c: text}\nd: *a\ne:\n  <<: *a\n  c: other\n")
    assert read_yaml(path)["e"] == {"b": [1, 2], "c": "other"}
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 2 if n else 'x')}]" for n in range(30)]
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match="too large, with its aliases"):
        checked_yaml(path)
    path.write_text(f"a: &a '{'x' * 1000}'\nb: [{', '.join(['*a'] * 2000)}]\n")
    with pytest.raises(UserError, match="too large, with its aliases"):
        checked_yaml(path)


@pytest.mark.parametrize("content", ["a: [", "a: ${b", "a: &a [*a]", "? [x]\n: 1", "a: \x00"])
def test_what_is_no_configuration_is_told_in_one_sentence(tmp_path, content):
    """Whatever is wrong with it."""
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(UserError, match=r"x\.yaml' "):
        read_yaml(tmp_path / "x.yaml")


def test_json_that_cannot_be_read_is_missing(tmp_path):
    """Half of it, another kind, or nested without end: the default is returned, and the file named."""
    path, missing = tmp_path / "x.json", []
    whole = json.dumps({"a": 1})
    for text, found in ((whole, {"a": 1}), (whole[:-2], {}), ("[1]", {}), ("[" * 100_000, {}), ("\x00", {}), ("", {})):
        path.write_text(text)
        assert read_json(path, {}, missing) == found
    assert missing == ["x.json"] * 5
    assert read_json(tmp_path / "none.json", None) is None
