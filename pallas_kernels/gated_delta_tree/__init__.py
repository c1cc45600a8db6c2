"""Gated delta rule (linear attention with a matrix state) over draft trees, and the commit of accepted tokens."""

from pallas_kernels.gated_delta_tree.api import gated_delta_fold, gated_delta_replay, gated_delta_tree
from pallas_kernels.gated_delta_tree.conv import conv_heads, short_conv, tree_conv, unit
from pallas_kernels.gated_delta_tree.mixer import MixerWeights, gated_delta_mixer, gated_norm, gates

__all__ = [
    "MixerWeights",
    "conv_heads",
    "gated_delta_fold",
    "gated_delta_mixer",
    "gated_delta_replay",
    "gated_delta_tree",
    "gated_norm",
    "gates",
    "short_conv",
    "tree_conv",
    "unit",
]
