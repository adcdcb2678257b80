"""Recognizes an exhausted device by its error, on every backend, and what is mistaken for one."""

from __future__ import annotations

import torch

from ..module_state.agreement import OtherRankError

_SIGNS = (
    "out of memory",  # CUDA, HIP, XPU, MPS
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "miopenStatusAllocFailed",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN says when no algorithm's workspace fits
    "unable to find an engine to execute this computation",  # cuDNN frontend, likewise
    "no valid cuDNN algorithm",
    "could not create a primitive",  # oneDNN
)
_NATIVE_FAILURES = ("std::bad_alloc", "bad allocation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory could not be allocated, whatever the device.

    Not where it was another process that ran out of it, or this one alone: then nothing can be tried again.
    """
    if isinstance(error, OtherRankError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(sign.lower() in text.lower() for sign in _SIGNS) or text in _NATIVE_FAILURES


def is_too_small_for_batch_norm(error: BaseException) -> bool:
    """Whether batch norm refused a batch with one value a channel: a lower limit on the size, not a lack of memory."""
    return isinstance(error, ValueError) and "Expected more than 1 value per channel when training" in str(error)
