"""Subcommands of `python -m ddtree_jax`."""
