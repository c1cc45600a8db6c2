"""Products of few rows with a large weight matrix: the linear layers of a decode step."""

from pallas_kernels.streaming_matmul.api import (
    PartialSums,
    partial_sums,
    runs_kernel,
    streaming_argmax,
    streaming_matmul,
    streaming_swiglu,
)

__all__ = ["PartialSums", "partial_sums", "runs_kernel", "streaming_argmax", "streaming_matmul", "streaming_swiglu"]
