"""The products between two mixers of a decoder, with the norms between them, as one kernel."""

from pallas_kernels.linear_chain.api import ChainWeights, Turns, linear_chain, runs_kernel, supported

__all__ = ["ChainWeights", "Turns", "linear_chain", "runs_kernel", "supported"]
