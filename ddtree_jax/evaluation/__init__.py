"""Comparison of methods on prompt files: runs, statistics, plots."""
