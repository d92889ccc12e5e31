#!/usr/bin/env bash
# Keras 3.15.1, gradient_accumulation_steps=4 with use_ema=True: the page of the optimizers says that the average of the
# weights counts accumulated steps. Only ema_overwrite_frequency does. The average itself is updated after every
# micro-batch, also when the weights did not change: ema_momentum acts like its fourth power, and the averaged weights
# are much closer to the last ones than with one large batch.
#
# Seen, eight samples, three optimizer steps, ema_momentum=0.5: the weights are the same after each step. The average is
# 1.344 with one batch of eight, and 1.4665 with four micro-batches of two.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q keras==3.15.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np


def train(batch_size, accumulated):
    """Return the weight after each epoch, which is one optimizer step, and the average that fit leaves in its place."""
    layers = [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer=optimizer, loss="mse")
    weights = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 8 // batch_size - 1:
                weights.append(float(model.get_weights()[0][0, 0]))

    inputs, targets = np.ones((8, 1), "float32"), np.arange(8, dtype="float32")[:, None]
    model.fit(inputs, targets, batch_size=batch_size, epochs=3, shuffle=False, verbose=0, callbacks=[Look()])
    return weights, float(model.get_weights()[0][0, 0])


weights, average = train(8, None)
same_weights, other_average = train(2, 4)
print("weights", weights, "average with one batch", average, "with four micro-batches", other_average)
assert np.allclose(weights, same_weights, atol=1e-5)
assert abs(average - 1.344) < 1e-4
assert abs(other_average - 1.4665) < 1e-4
END
