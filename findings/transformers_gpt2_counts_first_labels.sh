#!/usr/bin/env bash
# Transformers 5.24.0, Trainer with GPT2LMHeadModel: the loss is summed over labels[..., 1:] and divided by a count of all
# labels, the first of each sequence included. The Trainer means to leave the first out for causal language models; it
# knows them by loss_type, which is None for GPT2LMHeadModel, whose loss then is the causal one by default. So the
# gradient is too small, by a tenth for sequences of ten tokens; and so is the loss that is logged.
#
# Seen, eight sequences of four tokens in one step: the gradient is 0.75 times that of the mean over the 24 predictions.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q transformers==5.24.0 accelerate==1.15.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **none))
tokens = torch.randint(20, (8, 4))
seen = []


class Seeing(torch.optim.SGD):
    def step(self, closure=None):
        seen.append(model.transformer.wte.weight.grad.clone())
        return super().step(closure)


optimizer = Seeing(model.parameters(), lr=0.0)
arguments = TrainingArguments(
    "out", max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_grad_norm=0.0,
    use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
)
data = [{"input_ids": row, "labels": row} for row in tokens]
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule)).train()
mean = torch.autograd.grad(model(input_ids=tokens, labels=tokens).loss, model.transformer.wte.weight)[0]
ratio = float(seen[0].norm() / mean.norm())
print("gradient ÷ gradient of the mean:", ratio)
assert abs(ratio - 0.75) < 1e-3
END
