"""transformers: sentences classified, GPT-2 and a masked language model, from random weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    logging,
)

from clients.program import Program, train
from lightning_ga.plan.weights import TargetTokens

logging.set_verbosity_error()  # of token numbers that are larger than the vocabulary, which is small
WORDS = 50
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
}
BERT = {
    "vocab_size": WORDS + len(SPECIAL),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": WORDS + len(SPECIAL),
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of fifty words."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *(f"w{i}" for i in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


def sentences(number: int = 20) -> list[str]:
    """Sentences of 3 to 15 words."""
    lengths = [3 + 5 * i % 13 for i in range(number)]
    return [" ".join(f"w{int(i)}" for i in torch.randint(WORDS, (length,))) for length in lengths]


def loader(collator: Callable[[PreTrainedTokenizerFast], Any], batch: int, *, labels: bool = False) -> DataLoader[Any]:
    """Tokenized sentences, collated as the library does."""
    words = tokenizer()
    rows = [dict(words(sentence)) for sentence in sentences()]
    if labels:
        rows = [row | {"label": i % 3} for i, row in enumerate(rows)]
    return DataLoader(rows, batch_size=batch, collate_fn=collator(words))


def causal(words: PreTrainedTokenizerFast) -> Any:
    """Pads, and labels padding with -100."""
    return DataCollatorForLanguageModeling(words, mlm=False)


def masked(words: PreTrainedTokenizerFast) -> Any:
    """Draws masks."""
    return DataCollatorForLanguageModeling(words, mlm=True, mlm_probability=0.3)


class Transformer(LightningModule):
    """Whatever model, with the loss that it returns."""

    def __init__(self, model: Callable[[], PreTrainedModel]) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def classifier() -> PreTrainedModel:
    """Three classes of sentences."""
    return BertForSequenceClassification(BertConfig(**BERT, num_labels=3))


def fit(
    model: Callable[[], PreTrainedModel], data: Callable[[int], DataLoader[Any]], batch: int, callbacks: Sequence[Any]
) -> LightningModule:
    """Train a model of the library."""
    return train(partial(Transformer, model), partial(data, batch), callbacks)


gpt2 = partial(fit, lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), partial(loader, causal))
bert = partial(fit, lambda: BertForMaskedLM(BertConfig(**BERT)), partial(loader, masked))
classify = partial(fit, classifier, partial(loader, DataCollatorWithPadding, labels=True))

BY_SIZE = {"size_of": "auto"}
SHIFTED = {"normalize": TargetTokens(shift=True)}
IN_SINGLE = 1e-6  # GPT-2's loss is computed in single precision, whatever the model is in

PROGRAMS = [
    Program("transformers", "sentence classification", classify, 8),
    Program("transformers", "sentence classification, by size", classify, 8, settings=BY_SIZE),
    Program("transformers", "GPT-2", gpt2, 8, causes=("weighted",), tolerance=IN_SINGLE),
    Program("transformers", "GPT-2, TargetTokens", gpt2, 8, tolerance=IN_SINGLE, settings=SHIFTED),
    Program("transformers", "GPT-2, by size", gpt2, 8, tolerance=IN_SINGLE, settings=SHIFTED | BY_SIZE),
    Program("transformers", "masked LM", bert, 8, causes=("random", "weighted")),
    Program(
        "transformers",
        "masked LM, TargetTokens",
        bert,
        8,
        causes=("random", "exact"),
        settings={"normalize": TargetTokens()},
    ),
]
