"""Products of few rows with a large weight matrix: the linear layers of a decode step."""

from pallas_kernels.streaming_matmul.api import streaming_matmul, streaming_swiglu

__all__ = ["streaming_matmul", "streaming_swiglu"]
