"""Command lines of other programs: one sentence with what to type here."""

import re

import pytest

from lightning_ga import UserError
from lightning_ga.app.other_tools import OPTIONS, PLUGINS, WORDS, check_words, config_folder, in_our_words
from lightning_ga.train import options

LINES = [
    ("--lr 1e-3", "write optimizer.lr=1e-3."),
    ("--model vit_tiny_patch16_224", "write model=timm model.name=vit_tiny_patch16_224."),
    ("--model mlp", "write model=mlp."),
    ("-b 64", "write data.batch_size=64."),
    ("fit model=mlp", "write task=fit."),
    ("validate --ckpt_path=x.ckpt", "write task=validate ckpt_path=x.ckpt."),
    (
        "fit --model my.Net --data my.Data --trainer.max_epochs 3",
        "data=own data._target_=my.Data trainer.max_epochs=3.",
    ),
    ("--model.init_args.hidden 64", "write model.hidden=64."),
    ("--optimizer SGD", "write optimizer=sgd."),
    ("--sched Cosine", "write lr_scheduler=cosine."),
    ("--callbacks early_stopping", "write callbacks=[default,early_stopping]."),
    ("--opt lamb --layer-decay 0.75", "optimizer.name=lamb optimizer=timm optimizer.layer_decay=0.75."),
    ("--trainer.callbacks+=EarlyStopping", "callbacks=[default,early_stopping]."),
    ("-c mine.yaml", "--config-dir FOLDER experiment=NAME."),
    ("--print_config", "--cfg job."),
    ("/data/imagenet --model-ema --amp", "data.root=/data/imagenet callbacks=[default,ema] precision=bf16-mixed."),
    ("classify train model=mlp", "write task=fit."),
    ("--grad-checkpointing --save-steps 500", "write accumulate.checkpoint=auto checkpoint_every=500."),
    ("--hlep", "--hlep is neither KEY=VALUE nor an option"),
    ("--none-of-any 3", "write KEY=VALUE, without blanks; --help lists the keys."),
    ("trainer.max_epochs = 3", "trainer.max_epochs is neither KEY=VALUE"),
    ("trainer.max_epochs= 3", "3 is neither KEY=VALUE"),
    ("model.hidden=[32, 64]", "64] is neither KEY=VALUE"),
    ("digits", "digits is neither KEY=VALUE"),
]


@pytest.mark.parametrize(("line", "answer"), LINES)
def test_words_of_other_programs_are_translated(line, answer):
    with pytest.raises(UserError) as caught:
        check_words(line.split(), options())
    assert answer in str(caught.value)


def test_words_of_this_program_pass():
    lines = ("-m a=1,2 b=3", "--cfg job -p model", "~model.x +y=1", "--config-dir conf a=b", "--info defaults", "a=-1")
    for line in (*lines, *OPTIONS):
        check_words(line.split(), options())


def test_a_whole_line_of_timm_becomes_one_of_this_program(command):
    """Every word of the translation is read: the configuration composes, and has the values."""
    line = "--model resnet18 -b 24 --opt lamb --lr 5e-3 --weight-decay 0.02 --sched cosine --epochs 7 --warmup-epochs 2"
    line += " --mixup 0.2 --smoothing 0.1 --drop-path 0.05 --model-ema --amp -j 2 --clip-grad 1.0 --seed 3"
    (_, translated) = command(*line.split()).mistake.split(": write ")
    shown = command("--cfg", "job", *translated.rstrip(".").split())
    assert shown.code == 0, shown.err
    for part in ("max_epochs: 7", "lr: 0.005", "name: lamb", "batch_size: 24", "drop_path_rate: 0.05", "seed: 3"):
        assert part in shown.out


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
