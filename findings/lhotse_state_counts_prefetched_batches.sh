#!/usr/bin/env bash
# Lhotse 1.33.0, SimpleCutSampler and its relatives in a DataLoader with workers: by its page, the sampler's state_dict
# and load_state_dict restore the state of the training loop. The sampler runs in the main process, but ahead: the
# DataLoader draws prefetch_factor × num_workers batches more than it has given out. The state counts these as read, and
# with load_state_dict they never come in that epoch. A resume with num_workers=0, the usual test, is exact.
#
# Seen, twenty cuts in batches of two, stopped after three batches: without workers the run goes on at cut 6, with two
# workers at cut 14; the eight cuts in between are left out.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q lhotse==1.33.0 urllib3==2.5.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
from lhotse import CutSet
from lhotse.dataset import SimpleCutSampler
from lhotse.testing.dummies import DummyManifest
from torch.utils.data import DataLoader, Dataset

cuts = DummyManifest(CutSet, begin_id=0, end_id=20)


class Numbers(Dataset):
    def __getitem__(self, batch):
        return [int(cut.id.rsplit("-", 1)[1]) for cut in batch]


def seen(workers):
    """The numbers of the cuts before the stop after three batches, and after it."""
    sampler = SimpleCutSampler(cuts, max_cuts=2)
    batches = iter(DataLoader(Numbers(), sampler=sampler, batch_size=None, num_workers=workers))
    before = [number for _ in range(3) for number in next(batches)]
    state = sampler.state_dict()
    sampler = SimpleCutSampler(cuts, max_cuts=2)
    sampler.load_state_dict(state)
    loader = DataLoader(Numbers(), sampler=sampler, batch_size=None, num_workers=workers)
    return before, [number for batch in loader for number in batch]


for workers, goes_on in ((0, 6), (2, 14)):
    before, after = seen(workers)
    print(workers, "workers:", before, "then", after)
    assert before == list(range(6)) and after == list(range(goes_on, 20))
END
