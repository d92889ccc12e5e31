#!/usr/bin/env bash
# Lightning 2.6.6: RandomSampler(data, replacement=True, num_samples=8) draws 8 of 24 samples an epoch on one rank. On
# two ranks the Trainer puts a plain DistributedSampler in its place, which knows neither the number nor the
# replacement: an epoch has all 24 samples, each once, and three times as many optimizer steps. Nothing is said.
# WeightedRandomSampler, which is no RandomSampler, is wrapped, and keeps its 8.
#
# Seen: samples of an epoch over all ranks, distinct ones among them: RandomSampler 8 on one rank, 24 (24 distinct) on
# two; WeightedRandomSampler 8 on one and on two.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
    "$work/venv/bin/pip" install -q lightning==2.6.6
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6 lightning==2.6.6
fi
cd "$work"
cat > seen.py <<'END'
import json
import logging
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
SAMPLERS = {
    "RandomSampler": lambda: RandomSampler(range(24), replacement=True, num_samples=8),
    "WeightedRandomSampler": lambda: WeightedRandomSampler([1.0] * 24, num_samples=8),
}


class Sees(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return self.layer(batch[:, None].float()).mean()

    def on_train_end(self):
        name = sys.argv[1]
        with open(f"{name}-{self.trainer.world_size}-{self.trainer.global_rank}.json", "w") as file:
            json.dump(self.seen, file)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


ranks = int(sys.argv[2])
strategy = DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(max_epochs=1, accelerator="cpu", devices=ranks, strategy=strategy, **quiet)
trainer.fit(Sees(), DataLoader(range(24), batch_size=2, sampler=SAMPLERS[sys.argv[1]]()))
END
for sampler in RandomSampler WeightedRandomSampler; do
    for ranks in 1 2; do
        OMP_NUM_THREADS=1 "$work/venv/bin/python" seen.py "$sampler" "$ranks" > output.txt 2>&1 || { cat output.txt; exit 1; }
    done
done
"$work/venv/bin/python" - <<'END'
import json
from pathlib import Path

found = {}
for sampler in ("RandomSampler", "WeightedRandomSampler"):
    for ranks in (1, 2):
        seen = []
        for rank in range(ranks):
            seen += json.loads(Path(f"{sampler}-{ranks}-{rank}.json").read_text())
        found[sampler, ranks] = len(seen), len(set(seen))
        print(f"{sampler} on {ranks}: {len(seen)} samples, {len(set(seen))} distinct")
assert found["RandomSampler", 1][0] == 8
assert found["RandomSampler", 2] == (24, 24)
assert found["WeightedRandomSampler", 1][0] == found["WeightedRandomSampler", 2][0] == 8
END
