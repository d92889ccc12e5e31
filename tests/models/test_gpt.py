"""The small GPT is causal and blind to padding; ``tests/examples/test_language_model.py`` cuts its windows."""

import math

import pytest
import torch
from reference import Curves, quiet_trainer

from lightning_ga import AutoAccumulate
from lightning_ga.counters import TargetTokens
from lightning_ga.data import Definitions
from lightning_ga.data.sets import TextDataset, pad
from lightning_ga.models import GPT

TEXTS = ("a", "a living thing", "any of several trees", "unit", "a human being", "words")


def small(**arguments) -> GPT:
    torch.manual_seed(0)
    return GPT(context=32, width=16, depth=2, heads=2, **arguments).double()


def batch(*texts: str) -> dict[str, torch.Tensor]:
    return pad(list(TextDataset(texts, 32)))


def test_no_token_sees_a_later_one_or_the_padding():
    model = small().eval()
    alone, beside = model(batch("tree")["tokens"]), model(batch("tree", "trees grow here")["tokens"])
    torch.testing.assert_close(beside[0, :5], alone[0])
    torch.testing.assert_close(beside[1, :5], alone[0])


def test_perplexity_is_the_exponential_of_the_loss():
    model = small(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    loader = torch.utils.data.DataLoader(TextDataset(TEXTS, 32), batch_size=4, collate_fn=pad)
    trainer = quiet_trainer(max_epochs=1, precision="64-true", num_sanity_val_steps=2)
    trainer.fit(model, loader, loader)
    logged = trainer.callback_metrics
    assert logged["val/perplexity"] == pytest.approx(math.exp(logged["val/loss"]))
    with torch.no_grad():
        assert logged["val/loss"] == pytest.approx(float(model.token_loss(batch(*TEXTS))), rel=1e-6)
    assert math.isfinite(logged["train/loss"])


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_row_has_the_mean_over_the_tokens_of_its_window(mode):
    """That of the uncut batch, though its texts are of unequal length."""
    curves = []
    for micro_batch_size in (6, 2):
        loader = torch.utils.data.DataLoader(TextDataset(TEXTS * 2, 32), batch_size=6, collate_fn=pad)
        settings = {"micro_batch_size": micro_batch_size, "micro_batching": mode, "normalize": TargetTokens()}
        callback = AutoAccumulate(**settings, verify=False)
        logger = Curves()
        trainer = quiet_trainer(callback, logger=logger, log_every_n_steps=1, precision="64-true")
        trainer.fit(small(), loader, loader)
        curves.append([row["train/loss"] for row in logger.rows])
    assert len(curves[0]) == 4
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_definitions_come_whole_and_in_three_parts():
    """All 21,844, each in one part, the same parts every time, bytes that spell the text."""
    data, again = Definitions(batch_size=4), Definitions()
    for one in (data, again):
        one.setup("fit")
    assert {part: len(texts) for part, texts in data.splits.items()} == {"train": 19660, "val": 1092, "test": 1092}
    assert data.splits == again.splits
    texts = next(iter(data.val_dataloader()))
    assert bytes(texts["labels"][0][texts["labels"][0] > 0].tolist()).decode() == data.splits["val"][0]
    assert texts["tokens"].shape == texts["labels"].shape
