"""RF-DETR #916: under data parallelism the last window of an epoch is cut short, and ``drop_last`` does not help.

https://github.com/roboflow/rf-detr/issues/916 (closed): RF-DETR's loader used to fill whole effective batches and to
drop what was left. After its move to Lightning, ``drop_last=True`` drops by micro-batch of one rank: the rest of an
epoch makes a window of fewer micro-batches, each of which is divided by the full ``grad_accum_steps`` (Lightning
#19987), right before validation. The project's workaround repeats samples, drawn at random, until all windows are full.

Here 44 samples on 2 gloo ranks, batches of 2 and a factor of 4 make two windows of 16 and a rest of 12. Printed is
what a sample of each window weighs in the gradient that the optimizer is given, as a multiple of 1/n in a window of n
samples: 1 is the mean over the window.

- Lightning with ``drop_last=True``, as reported: the last window gives 3/4 of its gradient.
- With the first 4 samples repeated, as RF-DETR now does with random ones: full windows, some samples twice an epoch.
- ``AutoAccumulate()``: every sample once, every window right; with ``drop_last=True`` the rest is left out whole, as
  RF-DETR's own loader did.

Run it: ``python -m examples.issues.rf_detr_916``
"""

import logging
import warnings
from functools import partial

import torch
from lightning.pytorch.strategies import DDPStrategy

from examples.issues.sample_weights import Numbers, Weights, in_words, weights
from lightning_ga import AutoAccumulate

RANKS, BATCH, FACTOR, SAMPLES = 2, 2, 4, 44
MISSING = -SAMPLES % (RANKS * BATCH * FACTOR)


def table() -> dict[str, Weights]:
    """What each sample weighs in each window, by who accumulates."""
    strategy = partial(DDPStrategy, start_method="fork", process_group_backend="gloo")
    recipe = {"batch_size": BATCH, "accumulate_grad_batches": FACTOR, "devices": RANKS}
    ours = partial(AutoAccumulate, micro_batch_size=BATCH, verify=False)
    numbers, repeated = Numbers(SAMPLES), Numbers(SAMPLES, MISSING)
    return {
        "Lightning, drop_last=True": weights(numbers, drop_last=True, strategy=strategy(), **recipe),
        f"{MISSING} samples repeated": weights(repeated, drop_last=True, strategy=strategy(), **recipe),
        "AutoAccumulate": weights(numbers, ours(), strategy=strategy(), **recipe),
        "AutoAccumulate, drop_last=True": weights(numbers, ours(), drop_last=True, strategy=strategy(), **recipe),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)  # ranks are forks of this process
    print(
        f"What a sample weighs in each window, as a multiple of 1/n: {RANKS} ranks, batches of {BATCH}, factor {FACTOR}"
    )
    for who, windows in table().items():
        print(f"  {who:30}  {' | '.join(map(in_words, windows))}")


if __name__ == "__main__":
    main()
