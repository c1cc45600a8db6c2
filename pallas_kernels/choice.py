"""Which implementation of an operation runs: the one asked for, or the best that can do the call here."""

from __future__ import annotations

import functools

import jax

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def check(implementation: str | None) -> None:
    """Raises ValueError for a name that is none of `IMPLEMENTATIONS`."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def choose(implementation: str | None, obstacle: str | None) -> str:
    """The implementation to run; `obstacle` says what the GPU kernel cannot do about this call."""
    if implementation == "mosaic_gpu" and obstacle is not None:
        raise NotImplementedError(f"mosaic_gpu cannot do {obstacle}")
    if implementation is None:
        return "mosaic_gpu" if obstacle is None and on_hopper() else "xla"
    return implementation


@functools.cache
def on_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax.local_devices()[0].compute_capability == "9.0"


def multiprocessors() -> int:
    """Of the GPU that kernels run on."""
    return jax.local_devices()[0].core_count
