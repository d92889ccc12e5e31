"""Lightning #19987: the last, smaller window of an epoch is divided by the full number of micro-batches.

https://github.com/Lightning-AI/pytorch-lightning/issues/19987 (open): where an epoch's batches do not divide by
``accumulate_grad_batches``, the optimizer does step on the rest, but every loss was divided by the full factor. Here
10 batches of 4 samples at a factor of 4 make two windows of 4 batches and one of 2, which is given half of its
gradient. With 38 samples the last batch holds 2, each of which weighs as much as two others besides.

Printed is what a sample of each window weighs in the gradient that the optimizer is given, as a multiple of 1/n in a
window of n samples: 1 is the mean over the window.

Run it: ``python -m examples.issues.lightning_19987``
"""

import logging
import warnings

from examples.issues.sample_weights import Numbers, Weights, in_words, weights
from lightning_ga import AutoAccumulate

BATCH, FACTOR = 4, 4
SIZES = (40, 38)


def table() -> dict[str, Weights]:
    """What each sample weighs in each window, by data and by who accumulates."""
    found = {}
    for size in SIZES:
        recipe = {"batch_size": BATCH, "accumulate_grad_batches": FACTOR}
        found[f"{size} samples, Lightning"] = weights(Numbers(size), **recipe)
        ours = AutoAccumulate(micro_batch_size=BATCH, verify=False)
        found[f"{size} samples, AutoAccumulate"] = weights(Numbers(size), ours, **recipe)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    print(f"What a sample weighs in each window, as a multiple of 1/n: batches of {BATCH}, factor {FACTOR}")
    for who, windows in table().items():
        print(f"  {who:26}  {' | '.join(map(in_words, windows))}")


if __name__ == "__main__":
    main()
