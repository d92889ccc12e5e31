#!/usr/bin/env bash
# SpeechBrain 1.1.2, ConcatDatasetBatchSampler([sampler, other], [2, 2]) for a ConcatDataset: by its page the first two
# of each batch are of the first dataset, and the last two of the second. Where the second dataset begins is taken from
# the length of the first sampler, not from that of the first dataset. A sampler that draws fewer samples than its
# dataset has, as weighted ones do, shifts the second dataset: part of the first comes in its place, and as many samples
# at its end never come, in any epoch. Nothing warns.
#
# Seen, two datasets of ten, a0 to a9 and b0 to b9, of which the first is drawn six at a time: in fifty epochs, the
# places of the second hold a6 to a9 and b0 to b5.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q speechbrain==1.1.2 torchaudio==2.11.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
from speechbrain.dataio.sampler import (
    ConcatDatasetBatchSampler,
    ReproducibleRandomSampler,
    ReproducibleWeightedRandomSampler,
)
from torch.utils.data import ConcatDataset, DataLoader, Dataset


class Names(Dataset):
    def __init__(self, letter):
        self.letter = letter

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return f"{self.letter}{index}"


first, second = Names("a"), Names("b")


def places_of_the_second(drawn):
    """What fifty epochs have in the last two places of their batches."""
    samplers = [ReproducibleWeightedRandomSampler([1.0] * 10, drawn, False), ReproducibleRandomSampler(second)]
    sampler = ConcatDatasetBatchSampler(samplers, [2, 2])
    loader = DataLoader(ConcatDataset([first, second]), batch_sampler=sampler)
    found = set()
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for batch in loader:
            assert len(batch) == 4 and all(name[0] == "a" for name in batch[:2])
            found.update(batch[2:])
    return sorted(found)


six, ten = places_of_the_second(6), places_of_the_second(10)
print("places of the second, six drawn of the first:", six, "ten drawn:", ten)
assert six == ["a6", "a7", "a8", "a9", "b0", "b1", "b2", "b3", "b4", "b5"]
assert ten == [f"b{index}" for index in range(10)]
END
