"""One optimiser step, jitted: target features, blocks at random anchors, loss, gradients, AdamW.

Shape letters: b rows, S tokens a row, n blocks a row, B slots, L labels a block, E hidden size, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.models.abstract import init_params
from ddtree_jax.train.anchors import draw_anchors, valid_anchors
from ddtree_jax.train.config import TrainConfig, drafter_config
from ddtree_jax.train.data import Rows
from ddtree_jax.train.forward import draft_blocks, target_features
from ddtree_jax.train.loss import HeadSpec, block_labels, block_loss, cross_entropy
from ddtree_jax.train.parallel import ROWS, SHARED, over_rows, row_mesh, spread, total


@dataclasses.dataclass(frozen=True)
class Models:
    """Static part of a step; hashable, so a static jit argument.

    Attributes:
      config: settings of the run.
      target: the frozen target.
      drafter: in the dtype of activations.
      mesh: the devices that share a batch, None for one.
    """

    config: TrainConfig
    target: TargetConfig
    drafter: DrafterConfig
    mesh: Mesh | None = None

    @classmethod
    def of(cls, config: TrainConfig, target: TargetConfig) -> "Models":
        """Raises ValueError where `config` does not fit `target` or the devices that are here."""
        mesh = row_mesh(config.batch_size, config.devices)
        # Settings that compute nothing would only make equal programs compile twice.
        return cls(config.computing(), target, drafter_config(config, target), mesh)


@flax.struct.dataclass
class TrainState:
    """Everything that changes from step to step; donated to each.

    Attributes:
      params: of the drafter, float32.
      optimizer: of optax, float32.
      step: [] int32, steps done.
      total_steps: [] int32, where the learning rate will have decayed; a number of the state and not of the program, so
        that it may follow the clock without compiling anew.
    """

    params: Any
    optimizer: Any
    step: jax.Array
    total_steps: jax.Array


@flax.struct.dataclass
class Batch:
    """Rows on the device; see `data.Rows`. tokens, starts, ends: [b, S] int32; labels: [b, S] bool."""

    tokens: jax.Array
    starts: jax.Array
    ends: jax.Array
    labels: jax.Array


def to_device(rows: Rows, mesh: Mesh | None = None) -> Batch:
    """Copies rows to the device, or each device's share to it, without waiting."""
    return Batch(*spread(mesh, (rows.tokens, rows.starts, rows.ends, rows.labels)))


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW without its learning rate, which `learning_rate` gives."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2),
        optax.add_decayed_weights(config.weight_decay),
    )


def learning_rate(config: TrainConfig, step: jax.Array, total_steps: jax.Array) -> jax.Array:
    """Linear warm-up, then a cosine that ends at `total_steps`; [] float32."""
    step, total = step.astype(jnp.float32), jnp.maximum(total_steps, 1).astype(jnp.float32)
    warm = jnp.maximum(total * config.warmup_ratio, 1.0)
    progress = jnp.clip((step - warm) / jnp.maximum(total - warm, 1.0), 0.0, 1.0)
    cosine = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return config.learning_rate * jnp.minimum((step + 1) / warm, 1.0) * cosine


def init_state(models: Models, target_params: Any, total_steps: int) -> TrainState:
    """Fresh float32 weights, started as `config.init` says, and an empty optimiser."""
    config = models.config
    drafter = dataclasses.replace(models.drafter, dtype="float32")
    params = jax.jit(init_params, static_argnums=0)(drafter, jax.random.key(config.seed))
    if config.init in ("norm", "layers"):
        params = params | {"norm": _float32(_plain_norms(models.target, {"norm": target_params["norm"]})["norm"])}
    if config.init == "layers":
        first = models.target.num_layers - models.drafter.num_layers
        for i in range(min(models.drafter.num_layers, models.target.num_layers)):
            name = f"layers_{i}"
            theirs = target_params[f"layers_{max(first, 0) + i}"]
            params[name] = _like(params[name], _target_layer(models.target, models.drafter, theirs))
    return TrainState(params, optimizer(config).init(params), jnp.int32(0), jnp.int32(total_steps))


def _target_layer(config: TargetConfig, drafter: DrafterConfig, layer: Any) -> Any:
    """A layer of the target as the drafter has it: without output gates, and attention only of the same heads."""
    layer = _plain_norms(config, layer)
    heads, own = ((c.num_heads, c.num_kv_heads, c.head_dim) for c in (config, drafter))
    if heads != own:  # one matrix of as many rows may hold others
        return {name: value for name, value in layer.items() if name != "self_attn"}
    if "self_attn" not in layer:  # a recurrent layer has a feed-forward block to give, and norms
        return layer
    attention = dict(layer["self_attn"])
    fused = attention.pop("qkv_proj")["weight"]
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention |= {"qkv_proj": {"weight": fused[:rows]}}
    return {**layer, "self_attn": attention}


def _plain_norms(config: TargetConfig, tree: Any) -> Any:
    """`tree` with the weights of its zero-centred norms as a drafter has them, around 1."""
    if not config.zero_centred_norms:
        return tree

    def plain(path, x):
        return x + jnp.ones((), x.dtype) if any(str(key.key).endswith("norm") for key in path[:-1]) else x

    return {k: v if k == "linear_attn" else jax.tree_util.tree_map_with_path(plain, {k: v})[k] for k, v in tree.items()}


def _like(own: Any, other: Any) -> Any:
    """`own` with the arrays of `other` wherever name and shape agree."""
    if isinstance(own, dict):
        return {k: _like(v, other[k]) if k in other else v for k, v in own.items()}
    return _float32(other) if own.shape == other.shape else own


def _float32(tree: Any) -> Any:
    # Copies: the state is donated, and the target's own arrays must survive that.
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), tree)


def head_weight(target: TargetConfig, params: Any) -> jax.Array:
    """[V, E], the target's head."""
    return params["embed" if target.tie_embeddings else "lm_head"]["weight"]


def score_blocks(models: Models, params: Any, target_params: Any, batch: Batch, features, anchors, live):
    """Scores blocks at `anchors` [b, n], of which `live` [b, n] count.

    Args:
      params: float32 master weights of the drafter; gradients flow to them through a cast to the compute dtype.
      features: [b, S, T * E].

    Returns:
      (cross entropy [b, n, L] float32, correct [b, n, L] bool, valid [b, n, L] bool).
    """
    c, d = models.config, models.drafter
    params = jax.tree.map(lambda x: x.astype(d.jax_dtype), params)
    hidden = draft_blocks(
        d, params, target_params["embed"]["weight"], features, batch.tokens, batch.starts, anchors,
        chunk_bytes=c.attention_mib * 2**20, remat=c.remat,
    )  # fmt: skip
    labels, valid = block_labels(batch.tokens, batch.ends, batch.labels, anchors, live, d.block_size)
    spec = HeadSpec(multiplier=d.output_multiplier, softcap=d.logit_softcap, rows=c.head_rows)
    flat = hidden[:, :, 1:].reshape(-1, d.hidden_size)  # slot 0 is the anchor itself
    loss, correct = cross_entropy(spec, flat, head_weight(models.target, target_params), labels.reshape(-1))
    return loss.reshape(labels.shape), correct.reshape(labels.shape), valid


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """Key of a step's anchors, a function of (seed, step) alone."""
    return jax.random.fold_in(jax.random.key(seed), step.astype(jnp.uint32))


def features_of(models: Models, target_params: Any, batch: Batch) -> jax.Array:
    """The target's features of a batch, see `forward.target_features`; one program for training and evaluation."""
    d, limit = models.drafter, models.config.attention_mib * 2**20
    return _features(models.target, d.target_layer_ids, limit, models.mesh, target_params, batch.tokens, batch.starts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _features(target, taps, limit, mesh, params, tokens, starts):
    def features(params, tokens, starts):
        return target_features(target, params, tokens, starts, taps, limit)

    return over_rows(mesh, features, (SHARED, ROWS, ROWS), ROWS)(params, tokens, starts)


def train_step(models: Models, state: TrainState, target_params: Any, batch: Batch) -> tuple[TrainState, dict]:
    """One step; `state` is donated. Two programs, neither of which the host waits for.

    Returns:
      (state, sums to report: those of `loss.block_loss`, "gradient_norm" and "learning_rate").
    """
    return _update(models, state, target_params, batch, features_of(models, target_params, batch))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(models, state, target_params, batch, features):
    config, mesh = models.config, models.mesh
    valid = valid_anchors(batch.ends, batch.labels, config.block_size, config.partial_blocks)
    # Drawn for the whole batch, so that the number of devices changes no anchor.
    anchors, live = draw_anchors(step_key(config.seed, state.step), valid, config.anchors)

    def gradient(params, target_params, *rows):
        def objective(params):
            scores = score_blocks(models, params, target_params, *rows)
            return block_loss(config.loss, config.slot_gamma, config.dpace_alpha, *scores, mesh=mesh)

        return total(mesh, jax.grad(objective, has_aux=True)(params))

    gradient = over_rows(mesh, gradient, (SHARED, SHARED, ROWS, ROWS, ROWS, ROWS), SHARED)
    gradients, sums = gradient(state.params, target_params, batch, features, anchors, live)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its counter with floats
        updates, opt_state = optimizer(config).update(gradients, state.optimizer, state.params)
    rate = learning_rate(config, state.step, state.total_steps)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    sums |= {"gradient_norm": optax.tree.norm(gradients), "learning_rate": rate}
    return TrainState(params, opt_state, state.step + 1, state.total_steps), sums
