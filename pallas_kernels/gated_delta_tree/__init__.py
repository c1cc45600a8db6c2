"""Gated delta rule (linear attention with a matrix state) over draft trees, and the commit of accepted tokens."""

from pallas_kernels.gated_delta_tree.api import gated_delta_fold, gated_delta_replay, gated_delta_tree

__all__ = ["gated_delta_fold", "gated_delta_replay", "gated_delta_tree"]
