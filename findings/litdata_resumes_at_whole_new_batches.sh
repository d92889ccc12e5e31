#!/usr/bin/env bash
# litdata 0.2.76, StreamingDataLoader without workers: load_state_dict into a loader with another batch_size is
# accepted, as it is if the GPU changed between two runs. The position is kept in samples, but rounded down to whole
# batches of the new size. The samples in between are read twice in the epoch, and nothing says so.
#
# Seen, twenty samples, stopped after three batches of three: with batches of five, samples 5 to 8 come again; with
# batches of two, sample 8; with batches of three or one, none.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q litdata==0.2.76
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import os

os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = os.path.abspath("cache")
import litdata

litdata.optimize(
    fn=int, inputs=list(range(20)), output_dir="data", chunk_size=4, num_workers=1, start_method="fork", verbose=False
)


def samples(batches):
    return [sample for batch in batches for sample in batch.tolist()]


def read_again(batch_size):
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset("data"), batch_size=3, num_workers=0)
    batches = iter(loader)
    before = samples(next(batches) for _ in range(3))
    state = loader.state_dict()
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset("data"), batch_size=batch_size, num_workers=0)
    loader.load_state_dict(state)
    after = samples(loader)
    assert set(before) | set(after) == set(range(20))
    return sorted(set(before) & set(after))


again = {batch_size: read_again(batch_size) for batch_size in (1, 2, 3, 5)}
print("read again after three batches of three, by the new batch size:", again)
assert again == {1: [], 2: [8], 3: [], 5: [5, 6, 7, 8]}
END
