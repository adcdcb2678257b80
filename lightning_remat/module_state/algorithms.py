"""Choices between implementations of an operation, which give other bits: of cuDNN, oneDNN, cuBLAS, of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from ..devices import PRECISION_BACKENDS

_C = cast(Any, torch)._C
"""Where a choice is read at a tenth of the price of its public name: all are read in every call of a planned module."""

_PRECISIONS = tuple((backend, kind) for backend in PRECISION_BACKENDS for kind in ("matmul", "conv", "rnn"))
"""What has a precision of float32 of its own; what is set for all of a backend, or for all, shows there."""

_FLAGS = (
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction"),
    ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    ("get_num_threads", "set_num_threads"),
)
_PAIRS = tuple(
    (f"_get_cublas_allow_{dtype}_reduced_precision_reduction", f"_set_cublas_allow_{dtype}_reduced_precision_reduction")
    for dtype in ("fp16", "bf16")
)
"""Read as a pair, and set by two arguments."""


def algorithms_in_force() -> tuple[Any, ...]:
    """All that is chosen now; equal where the same is chosen."""
    return tuple([read() for read in _READ])


def set_algorithms(wanted: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    """Chooses what is wanted, where it is not what `algorithms_in_force` told."""
    for write, value, present in zip(_WRITE, wanted, now, strict=True):
        if value != present:
            write(value)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(flags: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


def _precisions() -> tuple[str, ...]:
    return tuple([_C._get_fp32_precision_getter(*place) for place in _PRECISIONS])


def _set_precisions(values: tuple[str, ...]) -> None:
    precision = dict(zip(_PRECISIONS, values, strict=True))
    device, host = PRECISION_BACKENDS
    is_high = precision[device, "matmul"] == "tf32"
    word = "medium" if precision[host, "matmul"] == "bf16" else "high" if is_high else "highest"
    older: tuple[tuple[Callable[[], Any], Callable[[Any], object], Any], ...] = (
        (_C._get_float32_matmul_precision, _C._set_float32_matmul_precision, word),
        (_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32, precision[device, "conv"] == "tf32"),
    )
    for read, write, value in older:  # each stands for several precisions
        try:
            read()
        except RuntimeError:  # these have been set one by one, and PyTorch wants none of it asked any more
            continue
        write(value)
    for place, value in precision.items():
        _C._set_fp32_precision_setter(*place, value)
        if _C._get_fp32_precision_getter(*place) != value:  # "none" of its own, it has that of its backend, or of all
            _C._set_fp32_precision_setter(*place, "ieee")


def _set_pair(write: Callable[[Any, Any], object], pair: tuple[Any, Any]) -> None:
    write(*pair)


_ALGORITHMS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_determinism, _set_determinism),
    (_precisions, _set_precisions),
    (lambda: tuple(_C._get_sdp_priority_order()), lambda order: _C._set_sdp_priority_order(list(order))),
    # Of what this build of PyTorch has.
    *((getattr(_C, read), getattr(_C, write)) for read, write in _FLAGS if hasattr(_C, read)),
    *((getattr(_C, read), partial(_set_pair, getattr(_C, write))) for read, write in _PAIRS if hasattr(_C, read)),
)
_READ = tuple(read for read, _ in _ALGORITHMS)
_WRITE = tuple(write for _, write in _ALGORITHMS)
