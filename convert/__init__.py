"""Converts published checkpoints of targets and drafters into checkpoints of `ddtree_jax`.

Command line: `python -m convert target SRC OUT` and `python -m convert drafter SRC OUT --target TARGET`.
"""

from convert.errors import ConversionError, ConversionWarning
from convert.run import convert_drafter, convert_target

__all__ = ["ConversionError", "ConversionWarning", "convert_drafter", "convert_target"]
