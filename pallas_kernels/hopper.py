"""Whether this process runs on a Hopper GPU."""

import functools

import jax


@functools.cache
def on_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax.local_devices()[0].compute_capability == "9.0"
