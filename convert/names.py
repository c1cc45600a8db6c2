"""Which source tensors make up which parameter: one table per architecture, in Hugging Face names.

A parameter is the concatenation, along rows, of its source tensors; the matrices of a mixture of experts are then cut
into one an expert. The tables say everything that a checkpoint must
hold, so a tensor that is missing or left over shows before the first byte is read.
"""

import dataclasses
import math
from collections.abc import Iterator

from convert.hf_config import ARCHITECTURES
from ddtree_jax.config import DrafterConfig, MoEConfig, TargetConfig


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the Flax tree.

    Attributes:
      path: "layers_0/self_attn/qkv_proj/weight".
      sources: (tensor name, shape) in order of rows.
      stack: how many matrices of equally many rows the parameter is cut into, along a new first axis; 0 for none.
      target_ids: the sources are whole numbers, each the target's id of a drafter's token less the drafter's own id.
        The parameter holds the target's ids, int32 whatever the dtype of the others.
    """

    path: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    stack: int = 0
    target_ids: bool = False

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Shape of the concatenation."""
        return (sum(shape[0] for _, shape in self.sources), *self.sources[0][1][1:])

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *rest = self.rows_shape
        return (self.stack, rows // self.stack, *rest) if self.stack else self.rows_shape

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
    yield from _projections(f"{to}/gate_up_proj", source, gate_up, hidden, False)
    yield _one(f"{to}/down_proj/weight", f"{source}.down_proj.weight", hidden, intermediate)


def _experts(to: str, source: str, hidden: int, moe: MoEConfig) -> Iterator[Parameter]:
    """Router, experts and shared expert; of each expert its gate rows, then its up rows."""
    count, size = moe.num_experts, moe.intermediate_size
    yield _one(f"{to}/gate/weight", f"{source}.gate.weight", count, hidden)

    def stacked(names: tuple[str, ...], *shape: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((f"{source}.experts.{j}.{name}.weight", shape) for j in range(count) for name in names)

    yield Parameter(f"{to}/gate_up_proj/weight", stacked(("gate_proj", "up_proj"), size, hidden), count)
    yield Parameter(f"{to}/down_proj/weight", stacked(("down_proj",), hidden, size), count)
    if moe.shared_intermediate_size:
        yield from _mlp(f"{to}/shared_expert", f"{source}.shared_expert", hidden, moe.shared_intermediate_size)
        yield _one(f"{to}/shared_expert_gate/weight", f"{source}.shared_expert_gate.weight", 1, hidden)


def _target(c: TargetConfig) -> Iterator[Parameter]:
    """Llama, Qwen2, Qwen3 and Qwen3-MoE share their names; the config says which norms, biases, experts there are."""
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
        moe = c.moe_of(i)
        to, source = f"{to}/mlp", f"{source}.mlp"
        yield from _experts(to, source, hidden, moe) if moe else _mlp(to, source, hidden, c.intermediate_size)
    yield _one("norm/weight", "model.norm.weight", hidden)
    if not c.tie_embeddings:
        yield _one("lm_head/weight", "lm_head.weight", c.vocab_size, hidden)


def _drafter(c: DrafterConfig) -> Iterator[Parameter]:
    """DFlash: no prefix; embedding, head and the table of a reduced vocabulary only where the drafter has its own."""
    hidden, bias = c.hidden_size, c.attention_bias
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    if c.own_embedding:
        yield _one("embed/weight", "embed_tokens.weight", c.target_vocab_size, hidden)
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
        yield from _mlp(f"{to}/mlp", f"{source}.mlp", hidden, c.intermediate_size)
    yield _one("norm/weight", "norm.weight", hidden)
    if c.own_head:
        yield _one("lm_head/weight", "lm_head.weight", c.vocab_size, hidden)
    if c.draft_vocab_size is not None:
        yield Parameter("d2t/target_ids", (("d2t", (c.draft_vocab_size,)),), target_ids=True)


_DRAFTER_PREFIXES = ("dflash_module.", "model.")
_DRAFTER_ALIASES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}


def drafter_name(name: str) -> str:
    """The z-lab name of a tensor of a drafter: prefixes of training frameworks taken away, other writers' names put."""
    for prefix in _DRAFTER_PREFIXES:
        name = name.removeprefix(prefix)
    alias = next((alias for alias in _DRAFTER_ALIASES if name.startswith(alias)), "")
    return _DRAFTER_ALIASES[alias] + name.removeprefix(alias) if alias else name


_TARGETS = {name: _target for name in ARCHITECTURES}
