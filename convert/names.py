"""Which source tensors make up which parameter: one table per architecture, in Hugging Face names.

A parameter is the concatenation, along rows, of its source tensors, or that in another order of rows; the matrices of a
mixture of experts are then cut into one an expert. The tables say everything that a checkpoint must hold, so a tensor
that is missing or left over shows before the first byte is read.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from convert.hf_config import ARCHITECTURES
from ddtree_jax.config import (
    DraftConfig,
    DrafterConfig,
    Eagle3Config,
    MoEConfig,
    MTPConfig,
    TargetConfig,
    parameter_dtype,
)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the Flax tree.

    Attributes:
      path: "layers_0/self_attn/qkv_proj/weight".
      sources: (tensor name, shape) in order of rows.
      order: the parameter's rows as slices of the concatenation, each row in one of them; None for all as they are.
      stack: how many matrices of equally many rows the parameter is cut into, along a new first axis; 0 for none.
      target_ids: the sources are whole numbers, each the target's id of a drafter's token less the drafter's own id.
        The parameter holds the target's ids.
    """

    path: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    order: tuple[slice, ...] | None = None
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

    def dtype(self, model: np.dtype) -> np.dtype:
        """That of the model, but for the few parameters that always have another (`parameter_dtype`)."""
        return np.dtype(parameter_dtype(self.path.split("/")[-1], model.name))


def parameters(config: TargetConfig | DraftConfig) -> tuple[Parameter, ...]:
    """Every parameter of the model of `config`, in the order of a forward pass."""
    if isinstance(config, DrafterConfig):
        return tuple(_drafter(config))
    if isinstance(config, Eagle3Config):
        return tuple(_eagle3(config))
    if isinstance(config, MTPConfig):
        return tuple(_mtp(config))
    return tuple(_target(config))


def ignored(config: TargetConfig | DraftConfig, name: str) -> bool:
    """Whether a tensor may be there without being used: buffers that are computed, not learnt; vision and multi-token
    prediction, which decoding text does not need; around a layer for prediction, the target that it lies in."""
    if isinstance(config, MTPConfig):
        return not name.startswith("mtp.")
    hybrid = isinstance(config, TargetConfig) and ARCHITECTURES[config.architecture].hybrid
    return name.endswith("rotary_emb.inv_freq") or (hybrid and name.startswith(("model.visual.", "mtp.")))


def tied_head(config: TargetConfig | DraftConfig) -> tuple[str, tuple[int, ...]] | None:
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

    yield Parameter(f"{to}/gate_up_proj/weight", stacked(("gate_proj", "up_proj"), size, hidden), stack=count)
    yield Parameter(f"{to}/down_proj/weight", stacked(("down_proj",), hidden, size), stack=count)
    if moe.shared_intermediate_size:
        yield from _mlp(f"{to}/shared_expert", f"{source}.shared_expert", hidden, moe.shared_intermediate_size)
        yield _one(f"{to}/shared_expert_gate/weight", f"{source}.shared_expert_gate.weight", 1, hidden)


def _target(c: TargetConfig) -> Iterator[Parameter]:
    """All families share their names; the config says which norms, biases and experts there are, and which mixers."""
    hidden, model = c.hidden_size, "model.language_model" if ARCHITECTURES[c.architecture].nested else "model"
    yield _one("embed/weight", f"{model}.embed_tokens.weight", c.vocab_size, hidden)
    for i in range(c.num_layers):
        to, source = f"layers_{i}", f"{model}.layers.{i}"
        yield _one(f"{to}/input_layernorm/weight", f"{source}.input_layernorm.weight", hidden)
        if i in c.delta_layers:
            yield from _gated_delta(c, f"{to}/linear_attn", f"{source}.linear_attn")
        else:
            yield from _attention(c, f"{to}/self_attn", f"{source}.self_attn")
        yield _one(f"{to}/post_attention_layernorm/weight", f"{source}.post_attention_layernorm.weight", hidden)
        moe = c.moe_of(i)
        to, source = f"{to}/mlp", f"{source}.mlp"
        yield from _experts(to, source, hidden, moe) if moe else _mlp(to, source, hidden, c.intermediate_size)
    yield _one("norm/weight", f"{model}.norm.weight", hidden)
    if not c.tie_embeddings:
        yield _one("lm_head/weight", "lm_head.weight", c.vocab_size, hidden)


def _attention(c: TargetConfig, to: str, source: str) -> Iterator[Parameter]:
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = {"q_proj": query * (2 if c.attention_gate else 1), "k_proj": key, "v_proj": key}
    for parameter in _projections(f"{to}/qkv_proj", source, qkv, c.hidden_size, c.qkv_bias):
        if c.attention_gate:
            queries, gates = _turns(c.num_heads, c.head_dim)
            rest = slice(2 * query, 2 * (query + key))
            parameter = dataclasses.replace(parameter, order=(*queries, rest, *gates))
        yield parameter
    if c.qk_norm:
        yield _one(f"{to}/q_norm/weight", f"{source}.q_norm.weight", c.head_dim)
        yield _one(f"{to}/k_norm/weight", f"{source}.k_norm.weight", c.head_dim)
    yield from _projections(f"{to}/o_proj", source, {"o_proj": c.hidden_size}, query, c.o_bias)


def _turns(heads: int, size: int) -> tuple[list[slice], list[slice]]:
    """Rows of queries and of output gates, which a source holds by turns, head by head; here the gates come last."""
    turns = _slices([size] * 2 * heads)
    return turns[::2], turns[1::2]


def _gated_delta(c: TargetConfig, to: str, source: str) -> Iterator[Parameter]:
    d, hidden = c.delta, c.hidden_size
    if c.architecture == "qwen3_next":
        yield _grouped_projection(c, f"{to}/in_proj/weight", source)
    else:
        heads = d.num_value_heads
        parts = {"in_proj_qkv": d.conv_channels, "in_proj_b": heads, "in_proj_a": heads, "in_proj_z": d.value_size}
        yield from _projections(f"{to}/in_proj", source, parts, hidden, False)
    yield _one(f"{to}/conv1d", f"{source}.conv1d.weight", d.conv_channels, 1, d.conv_kernel)
    yield _one(f"{to}/A_log", f"{source}.A_log", d.num_value_heads)
    yield _one(f"{to}/dt_bias", f"{source}.dt_bias", d.num_value_heads)
    yield _one(f"{to}/norm/weight", f"{source}.norm.weight", d.value_head_dim)
    yield _one(f"{to}/out_proj/weight", f"{source}.out_proj.weight", hidden, d.value_size)


def _grouped_projection(c: TargetConfig, path: str, source: str) -> Parameter:
    """Qwen3-Next packs its projections by key head: [q | k | v | z] and [b | a] of its value heads, head after head."""
    d, heads = c.delta, c.delta.num_value_heads
    group = heads // d.num_key_heads
    values = group * d.value_head_dim
    rows = 2 * (d.key_size + d.value_size)
    qkvz = _slices([d.key_head_dim, d.key_head_dim, values, values] * d.num_key_heads)
    ba = _slices([group, group] * d.num_key_heads, start=rows)
    order = (*qkvz[0::4], *qkvz[1::4], *qkvz[2::4], *ba[0::2], *ba[1::2], *qkvz[3::4])
    sources = ((f"{source}.in_proj_qkvz.weight", (rows, c.hidden_size)),)
    sources += ((f"{source}.in_proj_ba.weight", (2 * heads, c.hidden_size)),)
    return Parameter(path, sources, order)


def _slices(sizes: list[int], start: int = 0) -> list[slice]:
    """Consecutive slices of these sizes."""
    ends = list(itertools.accumulate(sizes, initial=start))
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


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
        qkv = {"q_proj": query, "k_proj": key, "v_proj": key}
        yield from _projections(f"{attention}/qkv_proj", heads, qkv, hidden, bias)
        yield _one(f"{attention}/q_norm/weight", f"{heads}.q_norm.weight", c.head_dim)
        yield _one(f"{attention}/k_norm/weight", f"{heads}.k_norm.weight", c.head_dim)
        yield from _projections(f"{attention}/o_proj", heads, {"o_proj": hidden}, query, bias)
        yield _one(f"{to}/post_attention_layernorm/weight", f"{source}.post_attention_layernorm.weight", hidden)
        yield from _mlp(f"{to}/mlp", f"{source}.mlp", hidden, c.intermediate_size)
        for name in ("attention_conv", "mlp_conv") if c.conv_taps else ():
            rows = 2 * c.conv_taps * hidden // c.conv_group_size
            yield _one(f"{to}/{name}/base_kernel", f"{source}.{name}.base_kernel", 2, c.conv_taps, hidden)
            weight = "kernel_projection.weight"
            yield _one(f"{to}/{name}/kernel_projection/weight", f"{source}.{name}.{weight}", rows, hidden)
    yield _one("norm/weight", "norm.weight", hidden)
    if c.selector_rank:
        for name in ("predecessor_codebook", "successor_codebook"):  # bare names in the published files
            yield _one(f"candidate_selector/{name}", f"candidate_selector.{name}", c.vocab_size, c.selector_rank)
        weight = "hidden_projection.weight"
        yield _one(
            "candidate_selector/hidden_projection/weight", f"candidate_selector.{weight}", c.selector_rank, hidden
        )
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


def _eagle3(c: Eagle3Config) -> Iterator[Parameter]:
    """EAGLE-3 without a prefix; the one layer is called midlayer."""
    hidden, wide = c.hidden_size, 2 * c.hidden_size
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    if c.own_embedding:
        yield _one("embed/weight", "embed_tokens.weight", c.target_vocab_size, hidden)
    yield _one("fc/weight", "fc.weight", hidden, len(c.target_layer_ids) * c.target_hidden_size)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield _one(f"{norm}/weight", f"midlayer.{norm}.weight", hidden)
    heads = "midlayer.self_attn"
    yield from _projections("self_attn/q_proj", heads, {"q_proj": query}, wide, False)
    yield from _projections("self_attn/kv_proj", heads, {"k_proj": key, "v_proj": key}, wide, False)
    yield from _projections("self_attn/o_proj", heads, {"o_proj": hidden}, query, False)
    yield from _mlp("mlp", "midlayer.mlp", hidden, c.intermediate_size)
    yield _one("norm/weight", "norm.weight", hidden)
    yield _one("lm_head/weight", "lm_head.weight", c.draft_vocab_size, hidden)
    yield Parameter("lm_head/target_ids", (("d2t", (c.draft_vocab_size,)),), target_ids=True)


def _mtp(c: MTPConfig) -> Iterator[Parameter]:
    """The prediction layer among the tensors of its target."""
    hidden, query, key = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer, heads = "mtp.layers.0", "mtp.layers.0.self_attn"
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield _one(f"{norm}/weight", f"mtp.{norm}.weight", hidden)
    yield _one("fc/weight", "mtp.fc.weight", hidden, 2 * hidden)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _one(f"{norm}/weight", f"{layer}.{norm}.weight", hidden)
    queries, gates = _turns(c.num_heads, c.head_dim)
    for parameter in _projections("self_attn/q_proj", heads, {"q_proj": 2 * query}, hidden, False):
        yield dataclasses.replace(parameter, order=(*queries, *gates))
    yield from _projections("self_attn/kv_proj", heads, {"k_proj": key, "v_proj": key}, hidden, False)
    yield _one("self_attn/q_norm/weight", f"{heads}.q_norm.weight", c.head_dim)
    yield _one("self_attn/k_norm/weight", f"{heads}.k_norm.weight", c.head_dim)
    yield from _projections("self_attn/o_proj", heads, {"o_proj": hidden}, query, False)
    if c.moe is None:
        yield from _mlp("mlp", f"{layer}.mlp", hidden, c.intermediate_size)
    else:
        yield from _experts("mlp", f"{layer}.mlp", hidden, c.moe)
    yield _one("norm/weight", "mtp.norm.weight", hidden)
