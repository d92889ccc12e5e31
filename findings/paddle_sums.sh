#!/usr/bin/env bash
# PaddlePaddle 3.3.1, Model.fit(accumulate_grad_batches=4): the optimizer sees the sum of the mean gradients of four
# batches, four times that of the large batch; a last window of three is the sum of three. "Mimic large batch size", says
# its page: for SGD the learning rate has to be divided by four, too.
#
# Seen: the first step of SGD changes the weights by lr × (g1 + g2 + g3 + g4).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q paddlepaddle==3.3.1 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import numpy as np
import paddle

paddle.set_default_dtype("float64")
generator = np.random.default_rng(0)
inputs, targets = generator.normal(size=(8, 3)), generator.normal(size=(8, 1))
net = paddle.nn.Linear(3, 1, bias_attr=False)
before = net.weight.numpy().copy()


class Data(paddle.io.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return inputs[index], targets[index]


model = paddle.Model(net)
model.prepare(paddle.optimizer.SGD(0.1, parameters=net.parameters()), paddle.nn.MSELoss())
model.fit(Data(), batch_size=2, accumulate_grad_batches=4, epochs=1, verbose=0, shuffle=False)
change = (before - net.weight.numpy()) / 0.1
total = sum(inputs[at : at + 2].T @ (inputs[at : at + 2] @ before - targets[at : at + 2]) for at in range(0, 8, 2))
print("change ÷ lr", change.ravel(), "sum of four gradients", total.ravel())
assert np.allclose(change, total)
END
