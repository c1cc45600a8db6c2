"""Targets and drafters ready to decode, and loading them from converted checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

from ddtree_jax.checkpoint import load_config, load_params
from ddtree_jax.config import DraftConfig, TargetConfig
from ddtree_jax.models.abstract import abstract_params, check_fits
from ddtree_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Target:
    """A target ready to decode: static config, parameters on the device, tokenizer (None where there is none)."""

    config: TargetConfig
    params: Any
    tokenizer: Tokenizer | None = None


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter ready to decode; it shares what it has not of its own with the target that it was loaded for."""

    config: DraftConfig
    params: Any


def load_target(path: str | Path) -> Target:
    """Loads a target that `python -m convert target` wrote. Raises ValueError naming the file and what is wrong."""
    config = load_config(path, kind="target")
    return Target(config, load_params(path, abstract_params(config)), Tokenizer.from_folder(path))


def load_drafter(path: str | Path, target: Target) -> Drafter:
    """Loads a drafter and checks that it fits `target`. Raises ValueError naming what does not."""
    config = load_config(path, kind="drafter")
    check_fits(config, target.config)
    return Drafter(config, load_params(path, abstract_params(config)))
