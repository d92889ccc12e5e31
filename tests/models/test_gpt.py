"""The small GPT: causal, blind to padding, and trained the same however its texts are cut."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from reference import quiet_trainer

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.data import Definitions
from lightning_ga.data.sets import TextDataset, pad
from lightning_ga.models import GPT
from lightning_ga.weights import TargetTokens

TEXTS = ("a", "a living thing", "any of several trees", "unit", "a human being", "words")


def small(**arguments) -> GPT:
    torch.manual_seed(0)
    return GPT(context=32, width=16, depth=2, heads=2, **arguments).double()


def batch(*texts: str) -> dict[str, torch.Tensor]:
    return pad(list(TextDataset(texts, 32)))


def trained(batch_size: int, factor: int, **accumulate) -> tuple[GPT, Trainer]:
    """Two windows of six texts in all, by plain SGD."""
    model = small(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    loader = torch.utils.data.DataLoader(TextDataset(TEXTS, 32), batch_size=batch_size, collate_fn=pad)
    callbacks = [AutoAccumulate(micro_batch_size=batch_size, **accumulate)] if accumulate else []
    settings = {"max_epochs": 1, "accumulate_grad_batches": factor, "precision": "64-true", "num_sanity_val_steps": 2}
    trainer = quiet_trainer(*callbacks, **settings)
    trainer.fit(model, loader, loader)
    return model, trainer


def test_no_token_sees_a_later_one_or_the_padding():
    model = small().eval()
    alone, beside = model(batch("tree")["tokens"]), model(batch("tree", "trees grow here")["tokens"])
    torch.testing.assert_close(beside[0, :5], alone[0])
    torch.testing.assert_close(beside[1, :5], alone[0])


def test_token_weights_train_as_whole_windows_do():
    """To the last digits in 64 bits; stock accumulation trains something else."""
    whole, _ = trained(4, 1)
    weighted, _ = trained(1, 4, normalize=TargetTokens())
    stock, _ = trained(1, 4)
    far = 0.0
    for wanted, ours, theirs in zip(whole.parameters(), weighted.parameters(), stock.parameters()):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
        far = max(far, float((theirs - wanted).detach().abs().max()))
    assert far > 1e-4


def test_perplexity_is_the_exponential_of_the_loss():
    model, trainer = trained(4, 1)
    logged = trainer.callback_metrics
    assert logged["val/perplexity"] == pytest.approx(math.exp(logged["val/loss"]))
    with torch.no_grad():
        assert logged["val/loss"] == pytest.approx(float(model.token_loss(batch(*TEXTS))), rel=1e-6)
    assert math.isfinite(logged["train/loss"])


def test_definitions_come_whole_and_in_three_parts():
    """All 21,844, each in one part, the same parts every time, bytes that spell the text."""
    data, again = Definitions(batch_size=4), Definitions()
    for one in (data, again):
        one.setup("fit")
    assert {part: len(texts) for part, texts in data.splits.items()} == {"train": 19660, "val": 1092, "test": 1092}
    assert data.splits == again.splits
    assert {"a human being"} <= {text for texts in data.splits.values() for text in texts}
    texts = next(iter(data.val_dataloader()))
    spelled = bytes(texts["labels"][0][texts["labels"][0] > 0].tolist()).decode()
    assert spelled == data.splits["val"][0]
    assert texts["tokens"].shape == texts["labels"].shape
    assert int(texts["tokens"][0, 0]) == 0


def test_heads_divide_the_width():
    """Refused in one sentence."""
    with pytest.raises(UserError, match="model.heads=3 must divide model.width=16"):
        GPT(width=16, heads=3)


def test_something_is_left_to_train_on():
    """Shares of one or more in sum are refused."""
    with pytest.raises(UserError, match="leave nothing to train on"):
        Definitions(val_fraction=0.5, test_fraction=0.5)
