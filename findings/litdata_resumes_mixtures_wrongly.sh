#!/usr/bin/env bash
# litdata 0.2.76, CombinedStreamingDataset in a StreamingDataLoader with two workers: after load_state_dict in
# mid-epoch, samples that were read before come again and others never come. A StreamingDataset alone resumes exactly
# with two workers, and so does the combined one with fewer.
#
# Seen, two datasets of twenty samples, batches of three, stopped after two batches: two samples are read twice, two
# never.
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
from collections import Counter

os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = os.path.abspath("cache")
import litdata


def write(name, first):
    litdata.optimize(
        fn=int, inputs=list(range(first, first + 20)), output_dir=name, chunk_size=4, num_workers=1,
        start_method="fork", verbose=False,
    )


def make_loader(kind, workers):
    data = [litdata.StreamingDataset("first"), litdata.StreamingDataset("second")]
    combined = litdata.CombinedStreamingDataset(data, seed=0, iterate_over_all=True)
    return litdata.StreamingDataLoader(data[0] if kind == "one" else combined, batch_size=3, num_workers=workers)


def stop_and_go_on(kind, workers):
    loader = make_loader(kind, workers)
    batches = iter(loader)
    read = [next(batches), next(batches)]
    state = loader.state_dict()
    loader = make_loader(kind, workers)
    loader.load_state_dict(state)
    return Counter(sample for batch in read + list(loader) for sample in batch.tolist())


write("first", 0)
write("second", 100)
everything = set(range(20)) | set(range(100, 120))
for workers in (0, 1, 2):
    counts = stop_and_go_on("combined", workers)
    twice, never = {sample for sample in counts if counts[sample] > 1}, everything - set(counts)
    print(workers, "workers: read twice", sorted(twice), "never", sorted(never))
    assert (len(twice), len(never)) == ((2, 2) if workers == 2 else (0, 0))
assert stop_and_go_on("one", 2) == Counter(range(20))
END
