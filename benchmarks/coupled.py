"""Losses that compare the samples of a batch, in the memory of a chunk: ``python -m benchmarks.coupled``.

Each loss is run on the whole batch, by plain accumulation over micro-batches, by ``lightning_ga.in_chunks``, by the
two passes of GradCache (arXiv 2101.06983) written by hand, and by OpenCLIP's loop for ``accum_freq``: features of all
micro-batches without gradients, then each micro-batch again with the whole loss.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from benchmarks.output import Record, benchmark, error, shown
from benchmarks.trainers import flat, relative_error
from lightning_ga import in_chunks
from lightning_ga.memory.live_tensors import LiveTensorMeter

BATCH, CHUNK, WIDTH = 64, 16, 32
FP64, FP32 = 1e-12, 1e-6
MOST_MEMORY, MOST_TIME = 1.1, 1.4
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def clip(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    logits, labels = temperature.exp() * normalize(one) @ normalize(other).T, torch.arange(len(one))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def siglip(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    logits = temperature.exp() * normalize(one) @ normalize(other).T
    return -logsigmoid((2 * torch.eye(len(one), dtype=one.dtype) - 1) * logits).sum() / len(one)


def simclr(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    both = normalize(torch.cat([one, other]))
    logits = (temperature.exp() * both @ both.T).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    return cross_entropy(logits, torch.arange(len(both)).roll(len(one)))


def barlow_twins(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    one, other = ((each - each.mean(0)) / each.std(0) for each in (one, other))
    return temperature * (one.T @ other / len(one) - torch.eye(one.shape[1], dtype=one.dtype)).square().sum()


def vicreg(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    spread = (1 - one.var(0).add(1e-4).sqrt()).relu().mean() + (1 - other.var(0).add(1e-4).sqrt()).relu().mean()
    return temperature * (one - other).square().mean() + spread


LOSSES: dict[str, Loss] = {each.__name__: each for each in (clip, siglip, simclr, barlow_twins, vicreg)}


class Towers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nets = nn.ModuleList([_tower(), _tower()])
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.to(dtype)

    def gradients(self) -> tuple[Tensor, Tensor]:
        of_encoders = flat(parameter.grad for parameter in self.nets.parameters())
        return of_encoders, flat([torch.zeros(1) if self.temperature.grad is None else self.temperature.grad])


def _tower() -> nn.Module:
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU()]
    layers += [nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU()]
    layers += [nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, WIDTH))


def whole(towers: Towers, views: Sequence[Tensor], loss: Loss) -> None:
    loss(*(net(view) for net, view in zip(towers.nets, views)), towers.temperature).backward()


def micro_batches(towers: Towers, views: Sequence[Tensor], loss: Loss) -> None:
    """The mean over micro-batches, each with a loss of its own."""
    for parts in zip(*(view.split(CHUNK) for view in views)):
        own = loss(*(net(part) for net, part in zip(towers.nets, parts)), towers.temperature)
        (own * (len(parts[0]) / len(views[0]))).backward()


def ours(towers: Towers, views: Sequence[Tensor], loss: Loss) -> None:
    """The same line as for the whole batch, in a context."""
    with in_chunks(towers.nets[0], chunk=CHUNK), in_chunks(towers.nets[1], chunk=CHUNK):
        whole(towers, views, loss)


def grad_cache(towers: Towers, views: Sequence[Tensor], loss: Loss) -> None:
    """Embeddings without a graph, their gradient, and each chunk again with that."""
    leaves = [torch.cat(parts).requires_grad_() for parts in _features(towers, views)]
    loss(*leaves, towers.temperature).backward()
    for net, view, leaf in zip(towers.nets, views, leaves):
        assert leaf.grad is not None
        for part, gradient in zip(view.split(CHUNK), leaf.grad.split(CHUNK)):
            net(part).backward(gradient)


def open_clip(towers: Towers, views: Sequence[Tensor], loss: Loss) -> None:
    """All features without a graph, then each micro-batch again, among them, with the loss of the whole."""
    features = _features(towers, views)
    for number, parts in enumerate(zip(*(view.split(CHUNK) for view in views))):
        mixed = []
        for net, part, cached in zip(towers.nets, parts, features):
            mixed.append(torch.cat([*cached[:number], net(part), *cached[number + 1 :]]))
        loss(*mixed, towers.temperature).backward()


@torch.no_grad()
def _features(towers: Towers, views: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[net(part) for part in view.split(CHUNK)] for net, view in zip(towers.nets, views)]


PROGRAMS = {each.__name__: each for each in (whole, micro_batches, ours, grad_cache, open_clip)}


def batches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(BATCH, 3, 4, 4, generator=generator, dtype=torch.float64)
    pictures = coarse.repeat_interleave(8, 2).repeat_interleave(8, 3)
    other = pictures + 0.3 * torch.randn(pictures.shape, generator=generator, dtype=torch.float64)
    return pictures.to(dtype), other.to(dtype)


def errors(program: Any, loss: Loss, dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative errors of the gradients of encoders and temperature."""
    oracle, towers = Towers(torch.float64), Towers(dtype)
    whole(oracle, batches(torch.float64), loss)
    program(towers, batches(dtype), loss)
    encoder, temperature = (relative_error(*pair) for pair in zip(towers.gradients(), oracle.gradients()))
    return encoder, temperature


def peaks(loss: Loss) -> dict[str, int]:
    """Live bytes of a step in fp32 beyond what is there: of each program, and the least, of its parts one by one."""
    towers, views = Towers(torch.float32), batches(torch.float32)
    whole(towers, views, loss)
    resident = [*views, *towers.parameters(), *(p.grad for p in towers.parameters())]

    def of_embeddings() -> None:
        loss(*(torch.randn(BATCH, WIDTH).requires_grad_() for _ in range(2)), towers.temperature).backward()

    def peak(step: Callable[[], object]) -> int:
        meter = LiveTensorMeter()
        meter.add(resident)
        before = meter.live_bytes
        with meter:
            meter.start()
            step()
        return meter.peak_bytes - before

    least = peak(lambda: towers.nets[0](views[0][:CHUNK]).sum().backward()) + peak(of_embeddings)
    return {"least": least} | {name: peak(partial(program, towers, views, loss)) for name, program in PROGRAMS.items()}


def ratios(loss: Loss, rounds: int) -> dict[str, float]:
    """Return the median ratios of the programs' processor time to that of the whole batch, by turns."""
    towers, views = Towers(torch.float32), batches(torch.float32)
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds + 1):
        for name, program in PROGRAMS.items():
            started = time.process_time()
            program(towers, views, loss)
            seconds[name].append(time.process_time() - started)
    return {name: median(a / b for a, b in zip(times[1:], seconds["whole"][1:])) for name, times in seconds.items()}


def measure(rounds: int = 15) -> dict[str, Any]:
    """Of each program on each loss: errors to the whole batch in fp64, the peak of memory, and the time."""
    groups: dict[str, Any] = {}
    for name, loss in LOSSES.items():
        times, peak_bytes, rows = ratios(loss, rounds), peaks(loss), {}
        for program_name, program in PROGRAMS.items():
            row: dict[str, Any] = {}
            for key, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
                row[f"encoder_{key}"], row[f"temperature_{key}"] = errors(program, loss, dtype)
            rows[program_name] = {**row, "peak_bytes": peak_bytes[program_name], "time": times[program_name]}
        groups[name] = {"least_peak_bytes": peak_bytes["least"], "rows": rows}
    return {"rounds": rounds, "groups": groups, "missed": [*missed(groups)]}


def missed(groups: Record) -> Iterator[str]:
    for name, group in groups.items():
        row, rounding = group["rows"]["ours"], group["rows"]["whole"]["encoder_fp32"]
        within = {
            "error in fp64": row["encoder_fp64"] <= FP64,
            "error in fp32": row["encoder_fp32"] <= max(FP32, rounding),
            "memory": row["peak_bytes"] <= MOST_MEMORY * group["least_peak_bytes"],
            "time": row["time"] <= MOST_TIME,
        }
        yield from (f"{name}: {what}" for what, met in within.items() if not met)


def text(record: Record) -> str:
    rows = []
    for name, group in record["groups"].items():
        for program, row in group["rows"].items():
            errors = [error(row[key]) for key in ("encoder_fp64", "temperature_fp64", "encoder_fp32")]
            mib, least = row["peak_bytes"] / 2**20, row["peak_bytes"] / group["least_peak_bytes"]
            first = name if program == "whole" else ""
            rows.append((first, program, *errors, f"{mib:.1f}", f"{least:.2f}", f"{row['time']:.2f}"))
    return shown(
        ("loss", "program"),
        ("fp64", "temp.", "fp32", "MiB", "÷ least", "time"),
        rows,
        f"Two convolutional encoders, batch {BATCH} in chunks of {CHUNK}.\n"
        "Relative errors to the whole batch in fp64: of the encoders' gradients in fp64\n"
        "and fp32, of the temperature's in fp64. MiB: live tensors beyond weights,\n"
        "gradients and batch; ÷ least: one chunk, embeddings and the loss, each alone.\n"
        f"time: processor time ÷ the whole batch's, median of {record['rounds']} rounds.\n"
        f"Targets of ours: 1e-12 in fp64; in fp32 1e-6, or what the whole batch\n"
        f"rounds; {MOST_MEMORY} of the least memory, {MOST_TIME} of the time.",
    )


main = benchmark("coupled", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
