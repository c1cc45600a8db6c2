"""Gated delta rule (linear attention with a matrix state) over draft trees, and the commit of accepted tokens."""

from pallas_kernels.gated_delta_tree.api import gated_delta_fold, gated_delta_replay, gated_delta_tree
from pallas_kernels.gated_delta_tree.conv import conv_heads, short_conv, tree_conv, unit

__all__ = [
    "conv_heads",
    "gated_delta_fold",
    "gated_delta_replay",
    "gated_delta_tree",
    "short_conv",
    "tree_conv",
    "unit",
]
