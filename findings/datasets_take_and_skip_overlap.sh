#!/usr/bin/env bash
# datasets 5.0.1, IterableDataset.take(n) and .skip(n), by which its page splits a stream into validation and training:
# in a DataLoader with workers, n is divided among the workers. Each worker takes or skips n ÷ workers of its own
# shards, not its part of the first n examples. So the examples depend on num_workers, and if the two loaders differ in
# num_workers, examples are in both sets and others are in neither. A worker without a shard counts in the division as
# well: of one shard and two workers, take(8) gives four examples.
#
# Seen, four shards of ten: take(8) without workers and skip(8) with two share 4 examples, and 4 are in neither.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q datasets==5.0.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import datasets
from torch.utils.data import DataLoader


def read(shards):
    for shard in shards:
        for number in range(10):
            yield {"example": 100 * shard + number}


def stream(shards):
    return datasets.IterableDataset.from_generator(read, gen_kwargs={"shards": list(range(shards))})


def examples(dataset, workers):
    context = "fork" if workers else None
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)
    return {row["example"] for row in loader}


validation = examples(stream(4).take(8), 0)
training = examples(stream(4).skip(8), 2)
neither = examples(stream(4), 0) - validation - training
print("in both:", sorted(validation & training), "in neither:", sorted(neither))
assert validation == set(range(8))
assert validation & training == {4, 5, 6, 7}
assert neither == {100, 101, 102, 103}
counts = [len(examples(stream(1).take(8), workers)) for workers in (0, 1, 2)]
print("examples of take(8) of one shard with 0, 1, 2 workers:", counts)
assert counts == [8, 8, 4]
END
