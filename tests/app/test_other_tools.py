"""Keys of other programs: one sentence with what to type here."""

import re

from lightning_ga.app.other_tools import PLUGINS, WORDS, config_folder, in_our_words
from lightning_ga.train import options


def test_every_translation_names_keys_that_there_are(command):
    """All translations that set one key, typed at once, compose."""
    chosen = ("model=timm", "optimizer=timm", "callbacks=[default,ema,early_stopping]")
    texts = {text for text in WORDS.values() if re.fullmatch(r"\+?[\w.]+=\S+", text) and "SHARE" not in text}
    keys = {text.partition("=")[0] for text in texts} - {*options()}
    assert len(keys) > 40
    run = command("--cfg", "job", *chosen, *(f"{key}=1" for key in sorted(keys)))
    assert run.code == 0, run.err


def test_plugins_are_those_that_hydra_names():
    assert all(one.startswith("hydra/") and "pip install hydra-" in text for one, text in PLUGINS.items())
    assert (config_folder() / "train.yaml").is_file()


def test_a_class_is_named_as_ones_own():
    assert in_our_words("model", "a.b.Net", options()) == "model=own model._target_=a.b.Net"
    assert in_our_words("nothing_of_all", "1", options()) is None
