#!/usr/bin/env bash
# spaCy 3.8.18, textcat and textcat_multilabel: the loss that is reported is a mean over the documents of a batch, but
# the gradient is the sum over them, so it is not the gradient of that loss. With twice the documents the loss is the
# same and the gradient twice as large. training.accumulate_gradient keeps the gradient, because parts of a sum are
# summed, and changes the loss instead: each part reports its mean, and these are added. So losses of runs with another
# accumulate_gradient cannot be compared, and gradients of runs with another batch size cannot.
#
# Seen, four documents: given twice in one batch, 1 times the loss and 2 times the gradient; in four parts, 4 times the
# loss and 1 times the gradient.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q spacy==3.8.18
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import warnings

warnings.simplefilter("ignore")
import numpy as np
import spacy
from spacy.training import Example

TEXTS = ["a red house", "the blue sea", "some green and old trees", "no colour"]


def measure(pipe, copies, parts):
    """Return the loss and the length of the gradient of the four documents."""
    spacy.util.fix_random_seed(0)
    nlp = spacy.blank("en")
    component = nlp.add_pipe(pipe)
    examples = [
        Example.from_dict(nlp.make_doc(text), {"cats": {"A": float(number % 2), "B": float(1 - number % 2)}})
        for number, text in enumerate(TEXTS)
    ] * copies
    nlp.initialize(lambda: examples[:4])
    losses = {}
    size = len(examples) // parts
    for part in range(parts):
        nlp.update(examples[part * size : (part + 1) * size], sgd=False, drop=0.0, losses=losses)
    squares = 0.0
    for node in component.model.walk():
        for name in node.param_names:
            if node.has_grad(name):
                squares += float(np.square(node.get_grad(name)).sum())
    return losses[pipe], squares**0.5


for pipe in ("textcat", "textcat_multilabel"):
    once, twice, cut = (np.array(measure(pipe, *how)) for how in ((1, 1), (2, 1), (1, 4)))
    print(f"{pipe}, loss and gradient: given twice × {twice / once}, in four parts × {cut / once}")
    assert np.allclose(twice / once, [1, 2], rtol=1e-2)
    assert np.allclose(cut / once, [4, 1], rtol=1e-2)
END
