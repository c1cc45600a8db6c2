"""Strictness for the whole suite: no silent dtype or rank promotion, and room for sharding tests."""

import gc
import os
import time

# One thread an operation: pytest-xdist fills the cores anyway, and on two of them XLA's pool can wait for itself for
# ever. More threads for programs than there are cores, since those of two devices wait for each other.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def forget_programs():
    """Compiled programs hold memory maps: when a worker has many, all of them go."""
    began = time.monotonic()
    yield
    if time.monotonic() - began < 1:  # nothing much was compiled
        return
    from ddtree_jax.decode import run

    if run.memory_maps() > run.MOST_MEMORY_MAPS:
        run._executables.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory):
    """Folder with `target` (two layers, byte-level tokenizer, chat template) and a random `drafter` of four slots."""
    from ddtree_jax import testing
    from ddtree_jax.checkpoint import save_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    target = testing.tiny_target(
        seed=5, vocab_size=testing.TINY_VOCABULARY, stop_token_ids=(0,), num_layers=2, sliding_windows=(None, None)
    )
    drafter = testing.tiny_drafter(target, block_size=4)
    save_checkpoint(folder / "target", target.config, target.params, testing.tiny_tokenizer_files(), source="test")
    save_checkpoint(folder / "drafter", drafter.config, drafter.params, source="test")
    return folder
