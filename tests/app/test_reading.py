import json

import pytest

from lightning_ga import UserError
from lightning_ga.app.reading import checked_yaml, read_json, read_yaml


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
