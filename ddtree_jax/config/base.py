"""What the configs of targets and drafters share."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp

from ddtree_jax.fields import from_json

# Parameters whose dtype is not the model's, by the last part of their path. The decays of Gated DeltaNet are
# exp(-exp(A_log) ...): these few numbers stay float32. Token ids are no weights.
FIXED_DTYPES = {"A_log": "float32", "dt_bias": "float32", "target_ids": "int32"}


def parameter_dtype(name: str, model: str) -> str:
    """The dtype of a parameter by the last part of its path: that of the model, but for a few by name."""
    return FIXED_DTYPES.get(name, model)


DTYPES = ("bfloat16", "float16", "float32")


class ModelConfig:
    """What the configs of checkpoints share: the dtype as jax's, and a JSON round trip."""

    dtype: str

    @property
    def jax_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuilds a config. Raises ValueError on a field that is missing, unknown or of another type, naming it."""
        config = from_json(cls, data)
        config.check()
        return config

    def check(self) -> None:
        """Raises ValueError where fields contradict each other."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        for name in ("sliding_windows", "causal"):
            entries = getattr(self, name, None)
            if entries is not None and len(entries) != self.num_layers:
                raise ValueError(f"{name}: expected {self.num_layers} entries, one a layer, found {len(entries)}")
