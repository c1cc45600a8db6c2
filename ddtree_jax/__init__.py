"""Exact speculative decoding with draft trees in JAX and Pallas."""
