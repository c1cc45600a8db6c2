"""Shared by the training tests: tiny models and rows."""

import dataclasses

import jax
import numpy as np

from ddtree_jax import testing
from ddtree_jax.models.abstract import init_params
from ddtree_jax.train.config import TrainConfig
from ddtree_jax.train.data import Document, pack

LENGTH = 48
# One target and one shape for all tests, so that they share compiled programs.
TARGET_SHAPE = dict(vocab_size=testing.TINY_VOCABULARY, stop_token_ids=(0,), num_layers=2, sliding_windows=(None,) * 2)


def tiny_target(seed: int = 5, **overrides):
    return testing.tiny_target(seed=seed, **TARGET_SHAPE | overrides)


def tiny_config(**overrides) -> TrainConfig:
    values = dict(
        mask_token_id=3, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40, taps=(0, 1),
        block_size=5, sequence_length=LENGTH, batch_size=2, anchors=6, steps=4, dtype="float32", head_rows=16,
        max_new_tokens=12, answer_slots=4, answer_refill=2, answers_per_shard=3, log_every=2, eval_every=0,
        checkpoint_every=0, learning_rate=1e-2, eval_answers=4, devices=1,
    )  # fmt: skip
    return TrainConfig(**values | overrides)


def random_documents(count: int = 6, seed: int = 0, longest: int = 40) -> list[Document]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        length = int(rng.integers(12, longest))
        out.append(Document(rng.integers(4, 99, length).astype(np.int32), int(rng.integers(2, 8))))
    return out


def tiny_rows(count: int = 6, seed: int = 0):
    return pack(random_documents(count, seed), LENGTH)


def drafter_params(config, seed: int = 3):
    return jax.jit(init_params, static_argnums=0)(dataclasses.replace(config, dtype="float32"), jax.random.key(seed))
