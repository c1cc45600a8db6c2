"""A GGUF file of a Llama-architecture model: config and tensors under their Hugging Face names.

GGUF keeps the rows of query and key projections in the order of interleaved rotary pairs; here they are put back into
the order of halves, which Hugging Face and this package use. Quantised tensors come out as float32.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import ConversionError, mismatch
from convert.hf_config import MAX_LAYERS
from convert.source import TensorInfo
from ddtree_jax.config import RopeConfig, TargetConfig

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = re.compile(r"\.(q_proj|k_proj)\.(weight|bias)$")


class GGUFSource:
    """Metadata and tensors of a GGUF file. Needs the `gguf` package.

    Attributes:
      file: the file.
      tensors: by Hugging Face name; names without a counterpart keep their own, for the check of names to refuse.
    """

    def __init__(self, file: Path):
        try:
            import gguf
        except ImportError:
            message = "reading GGUF needs the gguf package: pip install 'ddtree-jax[gguf]'"
            raise ConversionError(f"{file}: {message}") from None
        self._dequantize = gguf.quants.dequantize
        self.file = file
        try:
            reader = gguf.GGUFReader(file)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ConversionError(f"{file}: cannot be read as GGUF (truncated file?): {error}") from None
        self._fields = reader.fields
        self._stored: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for tensor in reader.tensors:
            name = hf_name(tensor.name)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            self._stored[name] = tensor
            self.tensors[name] = TensorInfo(file, shape, tensor.tensor_type.name)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default`."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise mismatch(self.file, key, expected="a value", found="nothing")
        return value

    def read(self, name: str) -> np.ndarray:
        tensor, info = self._stored[name], self.tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
        except NotImplementedError:
            expected = "a tensor type that the gguf package can dequantise"
            raise mismatch(self.file, name, expected=expected, found=info.dtype) from None
        if match := _ROTATED.search(name):
            heads = int(self.require("llama.attention.head_count"))
            kv_heads = int(self.get("llama.attention.head_count_kv", heads))
            values = halves_from_pairs(values, heads if match[1] == "q_proj" else kv_heads)
        return values


def hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; unknown names stay."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _BLOCK:
        return name
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head from (0a, 0b, 1a, 1b, ...) to (0a, 1a, ..., 0b, 1b, ...)."""
    per_head = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def gguf_target_config(source: GGUFSource, dtype: str | None = None) -> TargetConfig:
    """The config that a GGUF file describes; `dtype` None means bfloat16.

    Raises ConversionError: another architecture than llama, experts, a partial or scaled rotary embedding (linear
    scaling aside), sliding windows.
    """
    architecture = source.get("general.architecture")
    if architecture != "llama":
        raise mismatch(source.file, "general.architecture", expected="'llama'", found=repr(architecture))
    for key in ("llama.expert_count", "llama.attention.sliding_window"):
        if source.get(key):
            raise mismatch(source.file, key, expected="nothing", found=source.get(key))
    hidden, heads = int(source.require("llama.embedding_length")), int(source.require("llama.attention.head_count"))
    head_dim = int(source.get("llama.attention.key_length", hidden // heads))
    kv_heads = int(source.get("llama.attention.head_count_kv", heads))
    if kv_heads < 1 or heads % kv_heads:
        found = kv_heads
        raise mismatch(source.file, "llama.attention.head_count_kv", expected=f"a divisor of {heads}", found=found)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if int(source.get(key, head_dim)) != head_dim:
            raise mismatch(source.file, key, expected=f"{head_dim} (the head size)", found=source.get(key))
    if "model.embed_tokens.weight" not in source.tensors:
        raise mismatch(source.file, "token_embd.weight", expected="a tensor", found="no such tensor")
    layers = int(source.require("llama.block_count"))
    if not 1 <= layers <= MAX_LAYERS:
        raise mismatch(source.file, "llama.block_count", expected=f"1..{MAX_LAYERS}", found=layers)
    return TargetConfig(
        architecture="llama",
        vocab_size=source.tensors["model.embed_tokens.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(source.require("llama.feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_decimal(source.require("llama.attention.layer_norm_rms_epsilon")),
        rope=_rope(source),
        qk_norm=False,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in source.tensors,
        o_bias="model.layers.0.self_attn.o_proj.bias" in source.tensors,
        tie_embeddings="lm_head.weight" not in source.tensors,
        sliding_windows=(None,) * layers,
        max_position=int(source.require("llama.context_length")),
        stop_token_ids=_stop_token_ids(source),
        dtype=dtype or "bfloat16",
    )


def _rope(source: GGUFSource) -> RopeConfig:
    theta = _decimal(source.get("llama.rope.freq_base", 10000.0))
    kind = source.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=_decimal(source.require("llama.rope.scaling.factor")))
    raise mismatch(source.file, "llama.rope.scaling.type", expected="'none' or 'linear'", found=repr(kind))


def _stop_token_ids(source: GGUFSource) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = (source.get(key) for key in keys)
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _decimal(value: float) -> float:
    """A float32 of the file as the shortest decimal that gives it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
