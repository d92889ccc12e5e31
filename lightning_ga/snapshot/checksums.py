"""Tell whether values have changed if versions may not: by the sum of a tensor's bits, without a copy.

Fused kernels and whatever writes to ``tensor.data`` raise no version (``_version``). To read all values takes too long
to be done in every window: the exactness check and the first micro-batches do it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ga.snapshot.copies import is_writable

WORD = 8  # bytes that are added up as one integer


def checksums(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return the sum of each tensor's bits, 64 at a time; ``None`` for one whose memory cannot be read that way.

    Dispatch modes (which count operations, say) do not see it. If memory runs out, and on devices that do not know
    these operations, there are no sums.
    """
    listed = list(tensors)
    by_device: dict[torch.device, list[Tensor]] = {}
    try:
        with _disable_current_modes():
            sums = [_checksum(tensor) for tensor in listed]
            for total in sums:
                if total is not None:
                    by_device.setdefault(total.device, []).append(total)
            # One transfer for each device.
            values = {device: iter(torch.stack(totals).tolist()) for device, totals in by_device.items()}
    except RuntimeError:
        return [None] * len(listed)
    return [None if total is None else next(values[total.device]) for total in sums]


def differ(before: float | None, now: float | None) -> bool:
    """Return whether two sums of a tensor show that it has changed."""
    return before is not None and now is not None and before != now


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor | None:
    """Return the sum, where the tensor lies; 64-bit words are added as they are: to add others would copy them."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_meta or not is_writable(tensor):
        return None
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    strides = values.stride()
    flat = values.permute(sorted(range(values.dim()), key=strides.__getitem__, reverse=True)).reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % WORD:
        flat = flat.clone()
    words = flat.numel() * size // WORD * (WORD // size)
    rest = flat[words:].view(torch.uint8).sum(dtype=torch.int64)
    return flat[:words].view(torch.int64).sum() + rest
