#!/usr/bin/env bash
# torchdata 0.11.0, torchdata.nodes: Loader(Batcher(SamplerWrapper(RandomSampler(data)), 2)) has state_dict and
# load_state_dict, but of the sampler only the number of samples drawn is in the state. After load_state_dict, a new
# order is drawn and that many samples of it are skipped. So some samples are read twice in the epoch and others never,
# unless PyTorch's generator happens to be where it was. With RandomSampler(data, generator=...), seeded in the same way
# in both runs, the first epoch resumes rightly, and every later one goes on in the order of the first. The package's
# own StatefulDataLoader(shuffle=True) saves the generator, and is right in all these cases.
#
# Seen, twelve samples, stopped after three batches of two: 1 sample is read twice and 1 never in the first epoch, 2 and
# 2 in the second. With a seeded generator it is none in the first epoch and 3 in the second; with StatefulDataLoader
# none.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q torchdata==0.11.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torch.utils.data import RandomSampler
from torchdata.nodes import Batcher, Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader


def nodes(generator):
    return Loader(Batcher(SamplerWrapper(RandomSampler(range(12), generator=generator)), 2))


def stateful(generator):
    return StatefulDataLoader(range(12), batch_size=2, shuffle=True, generator=generator)


def never_read(make, epoch, seeded):
    """How many samples an epoch (from 0) never has, if it is stopped after three batches and resumed."""
    torch.manual_seed(0)
    loader = make(torch.Generator().manual_seed(0) if seeded else None)
    for _ in range(epoch):
        list(loader)
    batches = iter(loader)
    seen = [int(sample) for _ in range(3) for sample in next(batches)]
    state = loader.state_dict()
    torch.manual_seed(1)  # another process
    loader = make(torch.Generator().manual_seed(0) if seeded else None)
    loader.load_state_dict(state)
    seen += [int(sample) for batch in loader for sample in batch]
    assert len(seen) == 12
    return 12 - len(set(seen))


cases = [(0, False), (1, False), (0, True), (1, True)]
of_nodes = [never_read(nodes, *case) for case in cases]
of_stateful = [never_read(stateful, *case) for case in cases]
print("never read, by epoch and seeded generator:", dict(zip(cases, of_nodes)), "StatefulDataLoader:", of_stateful)
assert of_nodes == [1, 2, 0, 3] and of_stateful == [0, 0, 0, 0]
END
