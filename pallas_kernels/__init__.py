"""Attention and linear-attention kernels for NVIDIA Hopper, each with an XLA form that runs anywhere."""
