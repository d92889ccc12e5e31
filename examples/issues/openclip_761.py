"""OpenCLIP #761: does accumulation by cached features need a division by the number of micro-batches?

https://github.com/mlfoundations/open_clip/issues/761 (open; #957 is the same) asks whether the loss has to be divided
by ``accum_freq``. OpenCLIP computes the features of all micro-batches without gradients, then runs each one again
with gradients, puts its features beside the kept ones, and calls ``backward`` on the loss of the whole batch.

- Features reach the loss once in each pass, so the towers' gradients add up to the right ones: no division.
- The temperature ``logit_scale`` takes part in every pass with its full gradient: it is multiplied by ``accum_freq``.
  (Adam hides a constant factor; clipping by the norm of all gradients, and a changed ``accum_freq``, do not.)

So neither answer of the thread is right for all parameters. Ours takes the features' gradients once from the loss,
and sends each micro-batch's part of them back through the towers (gradient caching, Gao et al., arXiv 2101.06983).
``AutoAccumulate()`` cuts a batch and with it the negatives: its check at the start calls such a loss ``coupled``.
The model is a stand-in: two linear towers on random pairs, where everything is known to the last digit.

Run it: ``python -m examples.issues.openclip_761``
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

PAIRS, ACCUM_FREQS = 16, (1, 2, 4, 8)


class TwoTowers(nn.Module):
    """Features of images and of texts, and a temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 6), nn.Linear(10, 6)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def features(self, images: Tensor, texts: Tensor) -> Tensor:
        """Both sides of some pairs, ``(2, pairs, channels)``."""
        return torch.stack([normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1)])

    def loss(self, features: Tensor) -> Tensor:
        """The contrastive loss of a batch: every other pair is a negative."""
        logits = self.logit_scale.exp() * features[0] @ features[1].T
        pairs = torch.arange(len(logits))
        return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2


def whole(model: TwoTowers, images: Tensor, texts: Tensor) -> None:
    """The batch in one pass."""
    model.loss(model.features(images, texts)).backward()


def theirs(model: TwoTowers, images: Tensor, texts: Tensor, accum_freq: int) -> None:
    """Each micro-batch with gradients beside the kept features of the others."""
    batches = list(zip(images.chunk(accum_freq), texts.chunk(accum_freq)))
    with torch.no_grad():
        kept = [model.features(*batch) for batch in batches]
    for place, batch in enumerate(batches):
        features = [*kept[:place], model.features(*batch), *kept[place + 1 :]]
        model.loss(torch.cat(features, dim=1)).backward()


def ours(model: TwoTowers, images: Tensor, texts: Tensor, accum_freq: int) -> None:
    """The loss once, on features that are leaves; then each micro-batch receives the gradient of its own."""
    batches = list(zip(images.chunk(accum_freq), texts.chunk(accum_freq)))
    with torch.no_grad():
        features = torch.cat([model.features(*batch) for batch in batches], dim=1).requires_grad_()
    model.loss(features).backward()  # the temperature has its gradient now
    assert features.grad is not None
    for batch, gradient in zip(batches, features.grad.chunk(accum_freq, dim=1)):
        model.features(*batch).backward(gradient)


def factors(model: TwoTowers, right: dict[str, Tensor]) -> tuple[float, float]:
    """Gradients as multiples of those of one pass: of the towers, of the temperature."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    towers = [name for name in right if name != "logit_scale"]
    along = sum((found[name] * right[name]).sum() for name in towers) / sum(
        right[name].square().sum() for name in towers
    )
    return float(along), float(found["logit_scale"] / right["logit_scale"])


def table() -> list[tuple[int, float, float, float, float]]:
    """For each ``accum_freq`` the factors of the towers and of the temperature: theirs, then ours."""
    torch.manual_seed(0)
    model = TwoTowers().double()
    pairs = torch.randn(PAIRS, 12, dtype=torch.float64), torch.randn(PAIRS, 10, dtype=torch.float64)
    whole(model, *pairs)
    right = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    rows = []
    for accum_freq in ACCUM_FREQS:
        found = []
        for scheme in (theirs, ours):
            model.zero_grad()
            scheme(model, *pairs, accum_freq)
            found += factors(model, right)
        rows.append((accum_freq, *found))
    return rows


def main() -> None:
    print("Gradients as multiples of those of one pass over the whole batch")
    print("accum_freq   OpenCLIP's scheme: towers  logit_scale   features once: towers  logit_scale")
    for accum_freq, *found in table():
        print("{:10}   {:25.6f}  {:11.6f}   {:21.6f}  {:11.6f}".format(accum_freq, *found))


if __name__ == "__main__":
    main()
