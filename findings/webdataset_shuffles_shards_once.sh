#!/usr/bin/env bash
# WebDataset 1.0.2, WebDataset(urls, shardshuffle=100): the order of the shards is drawn once for each dataset object.
# Every epoch reads the shards in this order again, with or without seed=; only detshuffle=True draws anew. So
# with_epoch(n) with n below the size of the data never reaches the shards that came last in the draw, however many
# epochs there are. A shuffle of samples after it draws anew, and hides that the shards are the same.
#
# Seen, five shards of ten samples, shardshuffle=100, with_epoch(20), thirty epochs: samples of three shards, the third
# because ten samples are read ahead. With detshuffle=True: of five.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q webdataset==1.0.2
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import webdataset


def write():
    for shard in range(5):
        with webdataset.TarWriter(f"shard-{shard}.tar") as file:
            for number in range(10):
                file.write({"__key__": f"{shard}-{number}", "cls": shard})


def shards_read(**options):
    data = webdataset.WebDataset("shard-{0..4}.tar", shardshuffle=100, seed=1, **options)
    data = data.shuffle(10).decode().to_tuple("cls").with_epoch(20)
    epochs = [tuple(shard for (shard,) in data) for _ in range(30)]
    assert len(set(epochs)) == 30  # the samples come in another order each time
    return {shard for epoch in epochs for shard in epoch}


write()
once, anew = shards_read(), shards_read(detshuffle=True)
print("shards read in thirty epochs:", sorted(once), "with detshuffle:", sorted(anew))
assert len(once) == 3
assert len(anew) == 5
END
