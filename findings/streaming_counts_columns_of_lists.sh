#!/usr/bin/env bash
# Streaming 0.13.0, StreamingDataLoader with a collate function that returns the samples as a list, as detection models
# take them: for state_dict() the loader counts the samples that it has read, and of a batch that is neither a
# dictionary nor a tensor it takes len(batch[0]). In a list of samples, batch[0] is the first sample, so its columns are
# counted. A run that is resumed in mid-epoch reads samples again if a sample has fewer columns than a batch has
# samples, and leaves samples out if it has more. Nothing warns. A batch of columns, such as (images, labels), is
# counted rightly.
#
# Seen, 24 samples in batches of four, stopped after two batches: with three columns the run goes on at sample 6, with
# six columns at sample 12, with four at sample 8.
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
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset


def make_loader(columns):
    data = StreamingDataset(local=f"data{columns}", batch_size=4, shuffle=False)
    return StreamingDataLoader(data, batch_size=4, collate_fn=lambda samples: samples)


def read(batches):
    return [sample["0"] for batch in batches for sample in batch]


for columns, place in ((3, 6), (6, 12), (4, 8)):
    with MDSWriter(out=f"data{columns}", columns={str(column): "int" for column in range(columns)}) as writer:
        for sample in range(24):
            writer.write({str(column): sample for column in range(columns)})
    loader = make_loader(columns)
    batches = iter(loader)
    before = read([next(batches), next(batches)])
    state = loader.state_dict()
    loader = make_loader(columns)
    loader.load_state_dict(state)
    after = read(loader)
    print(columns, "columns: read up to", before[-1], "and resumed at", after[0])
    assert before == list(range(8))
    assert after == list(range(place, 24))
END
