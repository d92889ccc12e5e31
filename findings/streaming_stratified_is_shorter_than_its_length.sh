#!/usr/bin/env bash
# Streaming 0.13.0, StreamingDataset(streams=..., batching_method="stratified"): the share of each stream in a batch is
# rounded to whole samples, and the epoch ends with the stream that is used up first. The lengths of the dataset and of
# its loader are still those of all samples, and there is no warning. So the mixture is not that of the streams, samples
# of the larger one are left out, and a schedule that counts on len(loader) never ends.
#
# Seen, streams of 20 and 30 samples, batches of four: each has two of either stream. Both lengths promise 50 samples in
# 13 batches, and 40 samples in 10 batches come.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q mosaicml-streaming==0.13.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import warnings

warnings.simplefilter("ignore")
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset


def write(name, first, number):
    with MDSWriter(out=name, columns={"sample": "int"}, size_limit=60) as writer:
        for sample in range(first, first + number):
            writer.write({"sample": sample})


write("small", 0, 20)
write("large", 100, 30)
streams = [Stream(local="small"), Stream(local="large")]
data = StreamingDataset(streams=streams, batch_size=4, shuffle=True, batching_method="stratified")
loader = StreamingDataLoader(data, batch_size=4)
batches = [batch["sample"].tolist() for batch in loader]
print("promised:", len(data), "samples,", len(loader), "batches; came:", sum(map(len, batches)), "and", len(batches))
print("of the large stream in each batch:", [sum(sample >= 100 for sample in batch) for batch in batches])
assert (len(data), len(loader)) == (50, 13)
assert len(batches) == 10 and all(len(batch) == 4 for batch in batches)
assert all(sum(sample >= 100 for sample in batch) == 2 for batch in batches)
END
