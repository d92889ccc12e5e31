"""How far is a plan for another device from a measurement? ``python -m benchmarks.planning``.

Every row is probed twice on this CPU within the same budget: with real steps, and on tensors without values as if the
device were not here. What CUDA does otherwise (autocast, dropout) is compared with PyTorch's own dispatch for it.
There is no GPU in this: scratch memory of kernels and the allocator's fragmentation are not compared with anything.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import timm
import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from benchmarks import trainers
from benchmarks.networks import Apply, CausalBlocks, perceptron
from benchmarks.output import Record, benchmark, error, shown
from lightning_ga import AutoAccumulate, ProbeResult
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.plan.planned_device import planned_device
from lightning_ga.probe.planned.estimate import LikeCuda

CLASSES, TOKENS, WIDTH, IMAGE = 10, 64, 64, 32


def convolutions() -> nn.Sequential:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)]
    layers += [nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def of_tokens(*layers: nn.Module) -> nn.Sequential:
    """Layers between an embedding and logits by token."""
    head = nn.Linear(WIDTH, CLASSES), Apply(lambda logits: logits.transpose(1, 2))
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), *layers, *head)


def transformer(*, checkpointed: bool = False) -> nn.Sequential:
    return of_tokens(CausalBlocks(WIDTH, 4, 3, checkpointed=checkpointed))


def recurrent() -> nn.Sequential:
    return of_tokens(nn.LSTM(WIDTH, WIDTH, batch_first=True), Apply(lambda outputs: outputs[0]))


def plain(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1])


def reading(module: Any, batch: Any) -> Tensor:
    """Logs, reads a scalar, and keeps a metric."""
    logits = module.net(batch[0])
    loss = F.cross_entropy(logits, batch[1])
    module.accuracy(logits, batch[1])
    module.log_dict({"loss": loss, "accuracy": module.accuracy})
    return loss if loss.item() < 1e9 else 0 * loss


def masked(module: Any, batch: Any) -> Tensor:
    """A mean over the tokens under a mask, here all of them."""
    logits, mask = module.net(batch[0]).transpose(1, 2), batch[1] >= 0
    return F.cross_entropy(logits[mask], batch[1][mask])


images = lambda size: TensorDataset(torch.randn(size, 3, IMAGE, IMAGE), torch.randint(0, CLASSES, (size,)))  # noqa: E731
tokens = lambda size: TensorDataset(*torch.randint(0, CLASSES, (2, size, TOKENS)))  # noqa: E731
adam = partial(torch.optim.Adam, lr=1e-3)
sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    net: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    loss: Callable[[Any, Any], Tensor] = plain
    optimizer: Callable[..., torch.optim.Optimizer] = adam
    settings: Callable[[], dict[str, Any]] = field(default=dict)


fp16 = partial(pl.plugins.MixedPrecision, "16-mixed", "cpu")
mlp = lambda: nn.Sequential(nn.Flatten(), *perceptron((3 * IMAGE**2, 256, CLASSES), nn.ReLU))  # noqa: E731
resnet = partial(timm.create_model, "resnet18", num_classes=CLASSES)

CASES: tuple[Case, ...] = (
    Case("perceptron, Adam", mlp, images),
    Case("perceptron, Adam foreach", mlp, images, optimizer=partial(adam, foreach=True)),
    Case("convolutions, BatchNorm, dropout", convolutions, images),
    Case("the same, SGD momentum", convolutions, images, optimizer=sgd),
    Case("the same, metric, log, item", convolutions, images, loss=reading),
    Case("ResNet-18, Adam foreach", resnet, images, optimizer=partial(adam, foreach=True)),
    Case("ResNet-18, clipped, SGD", resnet, images, optimizer=sgd, settings=lambda: {"gradient_clip_val": 1}),
    Case("transformer, SDPA", transformer, tokens),
    Case("the same, clipped by value", transformer, tokens, settings=lambda: {
        "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    Case("the same, bf16-mixed", transformer, tokens, settings=lambda: {"precision": "bf16-mixed"}),
    Case("the same, fp16, GradScaler", transformer, tokens, settings=lambda: {
        "plugins": [fp16(torch.amp.GradScaler("cpu", init_scale=2.0))]}),
    Case("the same, checkpointed", partial(transformer, checkpointed=True), tokens),
    Case("the same, boolean mask", transformer, tokens, loss=masked),
    Case("LSTM (listed as unreliable)", recurrent, tokens),
)  # fmt: skip

SAMPLES = 16
Make = Callable[[], tuple[nn.Module, Tensor]]


def _pictures(name: str, size: int, **arguments: Any) -> Make:
    return lambda: (timm.create_model(name, num_classes=CLASSES, **arguments), torch.empty(SAMPLES, 3, size, size))


def _encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * TOKENS, CLASSES)), torch.empty(SAMPLES, TOKENS, 64)


FORWARD: dict[str, Make] = {
    "convolutions, BatchNorm, dropout": lambda: (convolutions(), torch.empty(SAMPLES, 3, 32, 32)),
    "ResNet-18": _pictures("resnet18", 64),
    "ConvNeXt atto": _pictures("convnext_atto", 64),
    "ViT tiny, dropout": _pictures("vit_tiny_patch16_224", 224, drop_rate=0.1),
    "transformer, SDPA": lambda: (transformer(), torch.empty(SAMPLES, TOKENS, dtype=torch.int64)),
    "nn.TransformerEncoderLayer": _encoder,
}


# PyTorch's own dispatch for CUDA: tensors without values may claim to lie on a CUDA device, and operators, dropout and
# autocast are then those of CUDA. PyTorch 2.15 cannot run a backward pass on such tensors, so what is compared is what
# the forward pass leaves alive: parameters, buffers, batch and saved activations.


class FusedAttention(TorchFunctionMode):
    """The kernels that a recent GPU takes: flash attention in half precision, the memory-efficient one in 32 bits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "scaled_dot_product_attention":
            return func(*args, **kwargs)
        q, k, v = args[:3]
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        causal = kwargs.get("is_causal", False)
        if torch.is_autocast_enabled("cuda"):
            q, k, v = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (q, k, v))
        if q.dtype is torch.float32:
            return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout, causal)[0]
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal)[0]


@contextmanager
def autocast(device: str) -> Iterator[None]:
    """``torch.autocast`` in bfloat16, which refuses CUDA where there is none."""
    with (
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda *_: True),
        torch.autocast(device, torch.bfloat16, cache_enabled=False),
    ):
        yield


def alive_after_forward(make: Make, device: str, *, half: bool, like_cuda: bool) -> int:
    """Bytes, by CUDA's rounding, that are alive before the backward pass."""
    net, batch = make()
    modes = LikeCuda() if like_cuda else FusedAttention() if device == "cuda" else nullcontext()
    meter = LiveTensorMeter(device=device, rounding=512)
    with FakeTensorMode(), torch.device(device), modes, meter:
        inputs = torch.empty(batch.shape, dtype=batch.dtype)
        net._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        with autocast(device) if half else nullcontext():
            outputs = net(inputs)
            loss = F.cross_entropy(outputs, torch.empty(SAMPLES, *outputs.shape[2:], dtype=torch.int64))
        assert loss.requires_grad
        return meter.live_bytes


def forward_rows() -> list[dict[str, Any]]:
    """What is alive by CUDA's own dispatch, by an estimate, and by CPU operators left as they are."""
    rows = []
    for name, make in FORWARD.items():
        for half in (False, True):
            cuda = alive_after_forward(make, "cuda", half=half, like_cuda=False)
            ours, cpu = (alive_after_forward(make, "cpu", half=half, like_cuda=like) for like in (True, False))
            rows.append({"case": name, "bf16-mixed": half, "cuda": cuda, "estimate": ours, "cpu": cpu})
    return rows


MOST = 96  # samples of the effective batch
AMPLE = 2**36  # bytes: any step fits
MB = 10**6


class Module(trainers.Module):
    """The network, loss and optimizer of a case; a fit ends after its first step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.net(), case.optimizer)
        self.case, self.accuracy = case, MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.case.loss(self, batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = True


def probe(case: Case, budget: int, *, estimated: bool) -> tuple[ProbeResult, tuple[str, ...]]:
    """The probe of a real Trainer, and what an estimate listed as unreliable."""
    torch.manual_seed(0)
    accumulate = AutoAccumulate(MOST, memory_budget=budget, verify=False, cache=False)
    trainer = trainers.quiet_trainer(max_epochs=1, callbacks=[accumulate], **case.settings())
    with planned_device(budget, like_cuda=False) if estimated else nullcontext() as device:
        trainer.fit(Module(case), DataLoader(case.data(MOST), batch_size=8))
    assert accumulate.probe is not None
    return accumulate.probe, () if device is None else tuple(device.unreliable)


def row(case: Case) -> dict[str, Any]:
    _, small, whole = probe(case, AMPLE, estimated=True)[0].trials
    budget = (small.peak_bytes + whole.peak_bytes) // 2
    (measured, _), (estimated, unreliable) = (probe(case, budget, estimated=which) for which in (False, True))
    peaks = {trial.micro_batch_size: trial.peak_bytes for trial in measured.trials if trial.fits}
    fitting = ((trial.micro_batch_size, trial.peak_bytes) for trial in estimated.trials if trial.fits)
    pairs = [(size, peaks[size], peak) for size, peak in fitting if size in peaks]
    return {
        "case": case.name,
        "budget": budget,
        "limit": {"measured": measured.limit, "estimated": estimated.limit},
        "peaks": [{"samples": size, "measured": real, "estimated": fake} for size, real, fake in pairs],
        "error": max(abs(fake - real) / real for _, real, fake in pairs),
        "unreliable": unreliable,
    }


def probed_text(record: Record) -> str:
    rows = []
    for one in record["rows"]:
        exact = "0" if one["error"] == 0 else error(one["error"])
        sizes = ", ".join(str(peak["samples"]) for peak in one["peaks"])
        limits = map(str, one["limit"].values())
        rows.append((one["case"], sizes, f"{one['peaks'][-1]['measured'] / MB:.1f}", exact, *limits))
    return shown(
        ("training step",),
        ("samples", "peak, MB", "error", "limit", "estimate"),
        rows,
        "Peak: measured at the last of these sizes. Error: the largest of the estimated\n"
        "peaks at these sizes, relative to the measured ones; 0 is equality to the byte.\n"
        "Limit: found with real steps, and estimated, within the same budget.",
    )


def text(record: Record) -> str:
    rows = []
    for one in record["forward"]:
        cuda = one["cuda"]
        errors = (f"{100 * (one[name] - cuda) / cuda:+.2f} %" for name in ("estimate", "cpu"))
        rows.append((one["case"], "bf16-mixed" if one["bf16-mixed"] else "fp32", f"{cuda / MB:.1f}", *errors))
    forward = shown(
        ("forward pass",),
        ("precision", "CUDA, MB", "error", "CPU as it is"),
        rows,
        "CUDA: alive after the forward pass of 16 samples, by PyTorch's own dispatch for\n"
        "CUDA on tensors without values. Error: of the estimate; CPU as it is: of one\n"
        "that keeps what CPU operators keep.",
    )
    return f"{probed_text(record)}\n\n{forward}"


def measure() -> dict[str, Any]:
    rows = [row(case) for case in CASES]
    wrong = [one for one in rows if one["error"] > 0.01 and not one["unreliable"]]
    missed = [f"{one['case']}: the estimate is off by {error(one['error'])}, at most 1 % was asked." for one in wrong]
    return {"rows": rows, "forward": forward_rows(), "missed": missed}


main = benchmark("planning", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
