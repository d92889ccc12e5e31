"""Which errors mean that memory ran out, and what is free after one."""

import gc
import weakref

import numpy as np
import pytest
import torch

from lightning_ga.memory.oom import attempt, is_ambiguous_out_of_memory, is_out_of_memory, release


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("C10 Out of Memory"),
        RuntimeError("CUDA ran out of memory outside PyTorch's allocator"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB)"),
        RuntimeError("Invalid buffer size: 80.00 GiB"),
        RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("miopenStatusAllocFailed"),
        RuntimeError("cuFFT error: HIPFFT_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"),
        RuntimeError("Not enough memory for workspace!"),
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    ],
    ids=lambda error: str(error)[:30] or type(error).__name__,
)
def test_known_errors_mean_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_ambiguous_out_of_memory(error)


def test_a_real_failure_of_numpy_is_recognised() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, dtype=np.uint8)
    assert is_out_of_memory(caught.value)


def test_a_real_failure_of_the_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("the words CUDA out of memory in an error of another kind"),
        KeyboardInterrupt(),
        SystemExit("CUDA out of memory"),
    ],
    ids=repr,
)
def test_other_errors_do_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    assert not is_ambiguous_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "Unable to find a valid cuDNN algorithm to run convolution",
        "FIND was unable to find an engine to execute this computation",
        "GET was unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    ],
)
def test_errors_of_libraries_are_ambiguous(text: str) -> None:
    assert is_ambiguous_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError(text))


def raised_from_one(outer: BaseException, *, hides: bool = False) -> BaseException:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise outer from (None if hides else error)
    except BaseException as error:
        return error


def test_errors_raised_from_one_count() -> None:
    """Libraries wrap: ``raise TrainingFailed from error``."""
    assert is_out_of_memory(raised_from_one(ValueError("wrapped")))


def test_an_error_that_hides_its_context_does_not_count() -> None:
    assert not is_out_of_memory(raised_from_one(ValueError("unrelated"), hides=True))


def test_an_interrupt_while_handling_one_is_an_interrupt() -> None:
    assert not is_out_of_memory(raised_from_one(KeyboardInterrupt()))


def test_errors_raised_while_handling_one_count() -> None:
    """Clean-up code may fail for lack of memory, with an error of its own."""
    inner, outer = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("clean-up failed")
    outer.__context__ = inner
    assert is_out_of_memory(outer)


def test_members_of_a_group_count() -> None:
    assert is_out_of_memory(ExceptionGroup("workers", [ValueError("a"), torch.OutOfMemoryError("b")]))


def test_a_chain_that_closes_on_itself_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def fail(pinned: list[weakref.ref[torch.UntypedStorage]]) -> None:
    activation = torch.ones(1000)
    pinned.append(weakref.ref(activation.untyped_storage()))
    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except RuntimeError as error:
        raise RuntimeError(f"wrapped, {len(activation)} samples") from error


def test_release_frees_what_the_traceback_pins() -> None:
    """Until then the frames of the error, and of those it was raised from, hold the activations."""
    pinned: list[weakref.ref[torch.UntypedStorage]] = []
    failure = None
    try:
        fail(pinned)
    except RuntimeError as error:
        failure = error
    gc.collect()
    assert failure is not None
    assert pinned[0]() is not None
    release(failure)
    assert pinned[0]() is None


def test_an_attempt_frees_what_its_failure_pins_and_raises_what_it_is_not_for() -> None:
    """Its error comes back without the frames of what failed; another error keeps them."""
    pinned: list[weakref.ref[torch.UntypedStorage]] = []
    failure = attempt(lambda: fail(pinned)).failure
    assert "wrapped, 1000 samples" in str(failure)
    assert pinned[0]() is None
    assert attempt(lambda: 3).result == 3
    with pytest.raises(RuntimeError, match="wrapped"):
        attempt(lambda: fail(pinned), lambda error: False)
