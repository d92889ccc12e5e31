"""Which errors mean that memory ran out, and what is free after one."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_ga.memory import oom
from lightning_ga.memory.oom import attempt, is_ambiguous_out_of_memory, is_out_of_memory

OUT_OF_MEMORY = """
CUDA out of memory. Tried to allocate 20.00 MiB.
CUDA error: out of memory
CUDA driver error: out of memory
Triton Error [CUDA]: out of memory
C10 Out of Memory
CUDA ran out of memory outside PyTorch's allocator
HIP out of memory. Tried to allocate 2.00 GiB
MPS backend out of memory (MPS allocated: 18.00 GB)
Invalid buffer size: 80.00 GiB
XPU out of memory. Tried to allocate 2.00 GiB
level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)
level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)
CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
miopenStatusAllocFailed
cuFFT error: HIPFFT_ALLOC_FAILED
CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
cuFFT error: CUFFT_ALLOC_FAILED
cusolver error: CUSOLVER_STATUS_ALLOC_FAILED
Not enough memory for workspace!
NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp
[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried
[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.
""".strip().splitlines()
AMBIGUOUS = """
Unable to find a valid cuDNN algorithm to run convolution
FIND was unable to find an engine to execute this computation
GET was unable to find an engine to execute this computation
cuDNN error: CUDNN_STATUS_NOT_SUPPORTED
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR
cuDNN error: CUDNN_STATUS_EXECUTION_FAILED
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)
""".strip().splitlines()


@pytest.mark.parametrize("text", [*OUT_OF_MEMORY, *AMBIGUOUS])
def test_errors_of_libraries_mean_out_of_memory_or_may_mean_it(text: str) -> None:
    error = RuntimeError(text)
    assert (is_out_of_memory(error), is_ambiguous_out_of_memory(error)) == (text in OUT_OF_MEMORY, text in AMBIGUOUS)


@pytest.mark.parametrize(("library", "kind"), [(np.empty, np.uint8), (torch.empty, torch.uint8)])
def test_real_failures_are_recognised(library: Callable[..., object], kind: object) -> None:
    """Of NumPy, and of PyTorch's allocator for the CPU."""
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        library(1 << 60, dtype=kind)
    assert is_out_of_memory(caught.value)


def closing_on_itself() -> RuntimeError:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    return first


def raised_from_one(outer: BaseException, *, hides: bool = False) -> BaseException:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise outer from (None if hides else error)
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        pytest.param(raised_from_one(ValueError("wrapped")), True, id="raised from one, as libraries wrap"),
        pytest.param(raised_from_one(ValueError("unrelated"), hides=True), False, id="hides its context"),
        pytest.param(raised_from_one(KeyboardInterrupt()), False, id="an interrupt while handling one"),
        pytest.param(ExceptionGroup("workers", [ValueError("a"), torch.OutOfMemoryError("b")]), True, id="a group"),
        pytest.param(closing_on_itself(), False, id="a chain that closes on itself"),
        pytest.param(RuntimeError("CUDA error: device-side assert triggered"), False, id="of CUDA, of another kind"),
        pytest.param(ValueError("the words CUDA out of memory in an error of another kind"), False, id="of no library"),
        pytest.param(SystemExit("CUDA out of memory"), False, id="an exit"),
    ],
)
def test_errors_that_have_to_do_with_one_count_or_do_not(error: BaseException, counts: bool) -> None:
    assert is_out_of_memory(error) == counts
    assert not is_ambiguous_out_of_memory(error)


def fail(pinned: list[weakref.ref[torch.UntypedStorage]], kind: type[Exception] = torch.OutOfMemoryError) -> None:
    activation = torch.ones(1000)
    pinned.append(weakref.ref(activation.untyped_storage()))
    try:
        raise kind("CUDA out of memory")
    except Exception as error:
        raise RuntimeError(f"wrapped, {len(activation)} samples") from error


def test_an_attempt_frees_what_its_failure_pins_and_raises_what_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error comes back without the frames of what failed; another error keeps them.

    Garbage is collected, and caches are emptied, only if memory ran out.
    """
    pinned: list[weakref.ref[torch.UntypedStorage]] = []
    failure = attempt(lambda: fail(pinned)).failure
    assert "wrapped, 1000 samples" in str(failure)
    assert pinned[0]() is None
    assert attempt(lambda: 3).result == 3
    monkeypatch.setattr(oom, "release", lambda error: pytest.fail("memory did not run out"))
    pinned.clear()
    assert "wrapped" in str(attempt(lambda: fail(pinned, ValueError), lambda error: True).failure)
    assert pinned[0]() is None
    with pytest.raises(RuntimeError, match="wrapped"):
        attempt(lambda: fail(pinned), lambda error: False)
