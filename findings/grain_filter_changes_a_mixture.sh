#!/usr/bin/env bash
# Grain 0.2.18, MapDataset.mix with weights: a dataset that was filtered before keeps its length, and is mixed by its
# places, also those that the filter has emptied. Iteration skips these afterwards. So a filter that keeps a third of
# one dataset makes its share of the mixture a third as large against the other, and the weights are not what is trained
# on. IterDataset.mix of the same two datasets draws from what is left, and keeps the weights.
#
# Seen, 90 elements, of which a filter keeps 30, mixed with 90 others by weights of 0.5 and 0.5: of the elements that
# come, 30 and 90; with IterDataset 30 and 30.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q grain==0.2.18
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
from grain import IterDataset, MapDataset

filtered = MapDataset.range(90).filter(lambda element: element % 3 == 0)
others = MapDataset.range(1000, 1090)


def shares(mixture):
    elements = list(mixture)
    return sum(element < 1000 for element in elements), sum(element >= 1000 for element in elements)


by_place = shares(MapDataset.mix([filtered, others], weights=[0.5, 0.5]))
by_element = shares(IterDataset.mix([filtered.to_iter_dataset(), others.to_iter_dataset()], weights=[0.5, 0.5]))
print("elements of the filtered and the other dataset, MapDataset.mix:", by_place, "IterDataset.mix:", by_element)
assert by_place == (30, 90)
assert by_element[0] == 30 and by_element[1] in (30, 31)
END
