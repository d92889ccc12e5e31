"""A small GPT: its loss is a mean over tokens, so micro-batches of unequal text need token weights."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn

from lightning_ga.errors import UserError
from lightning_ga.models.reference import ReferenceModule, SampleMean

Batch = Mapping[str, Tensor]
IGNORED = -100  # a label that is padding, as in torch.nn.CrossEntropyLoss


class GPT(ReferenceModule):
    """A decoder-only transformer that predicts each token from those before it.

    A batch is a mapping with ``tokens`` and ``labels``, both ``(batch, length)``; a label of -100 is padding.
    Padding stands behind the text, where no token can see it. Logs ``loss``, a mean over tokens in nats, and
    ``perplexity``, its exponential.

    Args:
        vocabulary: Number of tokens; 256 for bytes.
        context: Most tokens of a text.
        width: Channels of the residual stream.
        depth: Number of blocks.
        heads: Attention heads of a block; they divide the width.
        **training: ``optimizer`` and ``lr_scheduler`` of :class:`~lightning_ga.models.reference.ReferenceModule`.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        *,
        context: int = 512,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        **training: Any,
    ) -> None:
        if heads < 1 or width % heads:
            raise UserError(f"model.heads={heads} does not divide model.width={width}: change one of them.")
        super().__init__(("loss",), **training)
        self.net = Decoder(vocabulary, context, width, depth, heads)
        self.evaluated: Any = nn.ModuleDict({"loss": SampleMean(), "perplexity": Perplexity()})
        self.save_hyperparameters("vocabulary", "context", "width", "depth", "heads")

    def setup(self, stage: str) -> None:
        """Refuse data whose texts may be longer than the context, before the first step."""
        longest = getattr(self.trainer.datamodule, "max_length", 0)  # type: ignore[attr-defined]
        if longest > self.hparams["context"]:
            raise UserError(
                f"model.context={self.hparams['context']} must be at least the data.max_length={longest} tokens of a "
                "text: set data.max_length alone, which model.context follows."
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocabulary)`` of the token after each."""
        logits: Tensor = self.net(tokens)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over the tokens of one micro-batch; log the mean over the tokens of the window."""
        loss = self.token_loss(batch)
        self.record({"loss": loss}, count_tokens(batch))
        return loss

    def evaluate(self, batch: Batch, stage: str) -> None:
        """Log ``loss`` and ``perplexity`` over all tokens of a set."""
        loss = self.token_loss(batch)
        tokens = count_tokens(batch)
        for name, metric in self.evaluated.items():
            metric.update(loss, tokens)
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, batch_size=tokens)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Refuse: the logits of all tokens are of no use in a file."""
        raise UserError("task=predict has nothing to write of a language model's texts: use task=test.")

    def token_loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of the labels, a mean over tokens."""
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


class Perplexity(SampleMean):
    """The exponential of a mean loss."""

    def compute(self) -> Tensor:
        """Return it over all tokens."""
        return super().compute().exp()


class Decoder(nn.Module):
    """Embeddings of tokens and places, blocks, and logits by the same embedding; the arguments are those of ``GPT``."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocabulary)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.token(tokens) + self.place(places)))
        return F.linear(hidden, self.token.weight)


class Block(nn.Module):
    """Causal attention and a perceptron, each normalized before and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the new residual stream ``(batch, length, width)``."""
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm_attention(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = hidden + self.mlp(self.norm_mlp(hidden))
        return changed


def count_tokens(batch: Batch) -> int:
    """Return the labels of a batch that are no padding."""
    return int((batch["labels"] != IGNORED).sum())
