import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from lightning_ga import UserError
from lightning_ga.app.errors import explain, explain_key


def test_the_users_mistake_is_found_below_hydras_wrapping():
    """A UserError that a constructor raised is told as it is."""
    outer = InstantiationException("Error in call to target 'x'")
    outer.__cause__ = UserError("a=1 must be 2.")
    assert explain(outer) == "a=1 must be 2."


def test_an_unknown_argument_names_its_constructor():
    """The key in the configuration, the class, and Python's own words."""
    with pytest.raises(InstantiationException) as caught:
        instantiate({"_target_": "fractions.Fraction", "numerater": 1})
    assert explain(caught.value).startswith("fractions.Fraction could not be built: ")
    assert "numerater" in explain(caught.value)


def test_an_unknown_key_suggests_its_neighbour():
    """Only keys of the same section are offered."""
    assert "did you mean a.batch?" in explain_key("a.bach", ["batch", "other"])
    assert "did you mean" not in explain_key("a.qqq", ["batch"])


def test_a_long_message_is_cut_to_its_first_paragraph():
    """One line, whatever the library wrote."""
    assert explain(UserError("first\n  line\n\nsecond")) == "first line"
