"""These tests compile much and compute little: the compiler need not try hard."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
