"""Parameter trees as shapes, without a weight in memory, and the check that a drafter fits a target."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.config import DraftConfig, DrafterConfig, Eagle3Config, MTPConfig, TargetConfig
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.eagle3 import Eagle3
from ddtree_jax.models.mtp import MTP


def init_params(config: TargetConfig | DraftConfig, key: jax.Array) -> Any:
    """Random parameters at the shapes of `config` (norms one, biases zero)."""
    cache = KVCache.empty(config, batch=1, rows=8)
    one = jnp.zeros((1, 1), jnp.int32)
    if isinstance(config, TargetConfig):
        variables = Decoder(config).init(key, one, one, jnp.ones((1, 1, 1), jnp.uint32), cache, method=Decoder._touch)
        return variables["params"]
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = jnp.zeros((1, 1, width), config.jax_dtype)
    if isinstance(config, Eagle3Config):
        variables = Eagle3(config).init(key, one, features, cache, method=Eagle3._touch)
    elif isinstance(config, MTPConfig):
        hidden = jnp.zeros((1, 1, config.hidden_size), config.jax_dtype)
        variables = MTP(config).init(key, hidden, cache, method=MTP._touch)
    else:
        block = jnp.zeros((1, 1, config.hidden_size), config.jax_dtype)
        variables = DFlash(config).init(key, features, jnp.ones((1,), jnp.int32), block, cache, method=DFlash._touch)
    return variables["params"]


@functools.lru_cache
def abstract_params(config: TargetConfig | DraftConfig) -> Any:
    """The parameter tree of `config` as jax.ShapeDtypeStruct leaves."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def check_fits(drafter: DraftConfig, target: TargetConfig) -> None:
    """Raises ValueError naming the first way in which a drafter does not fit a target."""

    def require(name: str, expected: object, found: object, ok: bool) -> None:
        if not ok:
            raise ValueError(f"the drafter does not fit the target: {name}: expected {expected}, found {found}")

    d, t = drafter, target
    require("target_hidden_size", t.hidden_size, d.target_hidden_size, d.target_hidden_size == t.hidden_size)
    if isinstance(d, DrafterConfig):
        # Block input or output passes through the target's embedding or head.
        shares = not (d.own_embedding and d.own_head)
    else:
        shares = not getattr(d, "own_embedding", False)
    if shares:
        require("hidden_size", t.hidden_size, d.hidden_size, d.hidden_size == t.hidden_size)
    require("target_num_layers", t.num_layers, d.target_num_layers, d.target_num_layers == t.num_layers)
    require("target_vocab_size", t.vocab_size, d.target_vocab_size, d.target_vocab_size == t.vocab_size)
    if isinstance(d, DrafterConfig):
        convolved = d.hidden_size % d.conv_group_size == 0 or not d.conv_taps
        require("conv_group_size", f"a divisor of hidden_size {d.hidden_size}", d.conv_group_size, convolved)
        mapped = d.draft_vocab_size is not None
        require("own_head", "True with draft_vocab_size", d.own_head, d.own_head or not mapped)
        # A selector's codebooks are looked up by the target's ids, the anchor's among them.
        require(
            "draft_vocab_size", "none beside a candidate selector", d.draft_vocab_size, not (mapped and d.selector_rank)
        )
        require("block_size", "2 or more", d.block_size, d.block_size >= 2)
        require("mask_token_id", f"0..{t.vocab_size - 1}", d.mask_token_id, 0 <= d.mask_token_id < t.vocab_size)
    else:
        require("depth", f"1..{d.max_depth}", d.depth, 1 <= d.depth <= d.max_depth)
        rows = d.draft_vocab_size
        require("draft_vocab_size", f"1..{t.vocab_size}", rows, 1 <= rows <= t.vocab_size)
    if isinstance(d, MTPConfig):  # reads the final hidden state
        return
    ids = d.target_layer_ids
    ascending = all(a < b for a, b in itertools.pairwise(ids))
    in_range = bool(ids) and ids[0] >= 0 and ids[-1] < t.num_layers
    require("target_layer_ids", f"ascending block ids in 0..{t.num_layers - 1}", list(ids), ascending and in_range)
