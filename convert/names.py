"""Which source tensors make up which parameter: one table per architecture, in Hugging Face names.

A parameter is the concatenation, along rows, of its source tensors. The tables say everything that a checkpoint must
hold, so a tensor that is missing or left over shows before the first byte is read.
"""

import dataclasses
import math
from collections.abc import Iterator

from convert.hf_config import ARCHITECTURES
from ddtree_jax.config import DrafterConfig, TargetConfig


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the Flax tree.

    Attributes:
      path: "layers_0/self_attn/qkv_proj/weight".
      sources: (tensor name, shape) in order of rows.
    """

    path: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for _, shape in self.sources), *self.sources[0][1][1:])

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameters(config: TargetConfig | DrafterConfig) -> tuple[Parameter, ...]:
    """Every parameter of the model of `config`, in the order of a forward pass."""
    if isinstance(config, DrafterConfig):
        return tuple(_drafter(config))
    return tuple(_TARGETS[config.architecture](config))


def ignored(config: TargetConfig | DrafterConfig, name: str) -> bool:
    """Whether a tensor may be there without being used: buffers that are computed, not learnt."""
    return name.endswith("rotary_emb.inv_freq")


def tied_head(config: TargetConfig | DrafterConfig) -> tuple[str, tuple[int, ...]] | None:
    """Name and shape of a head that repeats the embedding table and may be left in a checkpoint."""
    if isinstance(config, TargetConfig) and config.tie_embeddings:
        return "lm_head.weight", (config.vocab_size, config.hidden_size)
    return None


def _one(path: str, name: str, *shape: int) -> Parameter:
    return Parameter(path, ((name, shape),))


def _projections(path: str, prefix: str, names: dict[str, int], columns: int, bias: bool) -> Iterator[Parameter]:
    """Weight and, if asked, bias of projections that share their input; `names` -> rows."""
    weights = tuple((f"{prefix}.{name}.weight", (rows, columns)) for name, rows in names.items())
    yield Parameter(f"{path}/weight", weights)
    if bias:
        yield Parameter(f"{path}/bias", tuple((f"{prefix}.{name}.bias", (rows,)) for name, rows in names.items()))


def _mlp(to: str, source: str, hidden: int, intermediate: int) -> Iterator[Parameter]:
    gate_up = {"gate_proj": intermediate, "up_proj": intermediate}
    yield from _projections(f"{to}/mlp/gate_up_proj", f"{source}.mlp", gate_up, hidden, False)
    yield _one(f"{to}/mlp/down_proj/weight", f"{source}.mlp.down_proj.weight", hidden, intermediate)


def _target(c: TargetConfig) -> Iterator[Parameter]:
    """Llama, Qwen2 and Qwen3 share their names; the config says which norms and biases there are."""
    hidden = c.hidden_size
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield _one("embed/weight", "model.embed_tokens.weight", c.vocab_size, hidden)
    for i in range(c.num_layers):
        to, source = f"layers_{i}", f"model.layers.{i}"
        attention, heads = f"{to}/self_attn", f"{source}.self_attn"
        yield _one(f"{to}/input_layernorm/weight", f"{source}.input_layernorm.weight", hidden)
        qkv = {"q_proj": query, "k_proj": key, "v_proj": key}
        yield from _projections(f"{attention}/qkv_proj", heads, qkv, hidden, c.qkv_bias)
        if c.qk_norm:
            yield _one(f"{attention}/q_norm/weight", f"{heads}.q_norm.weight", c.head_dim)
            yield _one(f"{attention}/k_norm/weight", f"{heads}.k_norm.weight", c.head_dim)
        yield from _projections(f"{attention}/o_proj", heads, {"o_proj": hidden}, query, c.o_bias)
        yield _one(f"{to}/post_attention_layernorm/weight", f"{source}.post_attention_layernorm.weight", hidden)
        yield from _mlp(to, source, hidden, c.intermediate_size)
    yield _one("norm/weight", "model.norm.weight", hidden)
    if not c.tie_embeddings:
        yield _one("lm_head/weight", "lm_head.weight", c.vocab_size, hidden)


def _drafter(c: DrafterConfig) -> Iterator[Parameter]:
    """DFlash in the z-lab layout: no prefix, no embedding, no head."""
    hidden, bias = c.hidden_size, c.attention_bias
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield _one("fc/weight", "fc.weight", hidden, len(c.target_layer_ids) * c.target_hidden_size)
    yield _one("hidden_norm/weight", "hidden_norm.weight", hidden)
    for i in range(c.num_layers):
        to, source = f"layers_{i}", f"layers.{i}"
        attention, heads = f"{to}/self_attn", f"{source}.self_attn"
        yield _one(f"{to}/input_layernorm/weight", f"{source}.input_layernorm.weight", hidden)
        yield from _projections(f"{attention}/q_proj", heads, {"q_proj": query}, hidden, bias)
        yield from _projections(f"{attention}/kv_proj", heads, {"k_proj": key, "v_proj": key}, hidden, bias)
        yield _one(f"{attention}/q_norm/weight", f"{heads}.q_norm.weight", c.head_dim)
        yield _one(f"{attention}/k_norm/weight", f"{heads}.k_norm.weight", c.head_dim)
        yield from _projections(f"{attention}/o_proj", heads, {"o_proj": hidden}, query, bias)
        yield _one(f"{to}/post_attention_layernorm/weight", f"{source}.post_attention_layernorm.weight", hidden)
        yield from _mlp(to, source, hidden, c.intermediate_size)
    yield _one("norm/weight", "norm.weight", hidden)


_TARGETS = {name: _target for name in ARCHITECTURES}
