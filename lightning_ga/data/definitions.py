"""21,844 English definitions of nouns, 6 to 431 characters long, that timm ships: text of very unequal length."""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_ga.data.images import Loaded
from lightning_ga.errors import UserError

FILE = "_info/imagenet_synset_to_definition.txt"  # of timm.data; WordNet's names of ImageNet's 21,844 classes
END = 0  # the byte before and behind a text; none has it inside
IGNORED = -100  # a label that is padding, as in torch.nn.CrossEntropyLoss

Text = dict[str, Tensor]


class Definitions(Loaded):
    """Train, validation and test loaders over texts as bytes, each batch padded to its longest text.

    A batch is a mapping: ``tokens`` ``(batch, length)``, and ``labels``, the token after each, -100 where padded.
    ``lightning_ga.weights.TargetTokens()`` counts the tokens that the loss is a mean over.

    Args:
        batch_size: Texts of a training batch on one rank.
        eval_batch_size: Texts of a validation or test batch; it changes speed and memory, no result.
        num_workers: Processes that load data; 0 loads in the training process.
        max_length: Most tokens of a text, the end included; the rest of a longer text is left out.
        val_fraction: Share of the texts that is kept for validation.
        test_fraction: Share of the texts that is kept for the test.
        split_seed: Seed of that choice: the split does not change with the seed of a run.
    """

    name = "definitions"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        max_length: int = 512,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        if val_fraction + test_fraction >= 1:
            raise UserError(
                f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} leave nothing to train on: "
                "their sum must be below 1."
            )
        self.batch_size, self.eval_batch_size, self.num_workers = batch_size, eval_batch_size, num_workers
        self.max_length = max_length
        self.fractions, self.split_seed = (val_fraction, test_fraction), split_seed
        self.splits: dict[str, Sequence[str]] = {}

    def setup(self, stage: str) -> None:
        """Read the texts once, and part them."""
        if not self.splits:
            texts = read_definitions()
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.split_seed)).tolist()
            val, test = (int(fraction * len(texts)) for fraction in self.fractions)
            places = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
            self.splits = {part: [texts[place] for place in sorted(chosen)] for part, chosen in places.items()}

    def dataset(self, part: str) -> Dataset[Text]:
        """The texts of a part."""
        return TextDataset(self.splits[part], self.max_length)

    def collate(self, part: str) -> Callable[..., Text]:
        """What pads texts to one length."""
        return pad


class TextDataset(Dataset[Text]):
    """Texts as bytes: the tokens, and the token after each as its label."""

    def __init__(self, texts: Sequence[str], max_length: int) -> None:
        self.texts = texts
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Text:
        content = torch.tensor([END, *self.texts[index].encode(), END][: self.max_length + 1])
        return {"tokens": content[:-1], "labels": content[1:]}


def pad(texts: Sequence[Mapping[str, Tensor]]) -> Text:
    """Return a batch as long as its longest text."""
    fills = {"tokens": END, "labels": IGNORED}
    return {
        name: pad_sequence([text[name] for text in texts], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


def read_definitions() -> list[str]:
    """Return timm's definitions, one for each of its synsets, in their order."""
    content = (files("timm.data") / FILE).read_text(encoding="utf-8")
    return [line.partition("\t")[2] for line in content.splitlines()]
