"""Attention of draft-tree nodes over a cached prefix and the tree itself."""

from pallas_kernels.tree_attention.api import tree_attention

__all__ = ["tree_attention"]
