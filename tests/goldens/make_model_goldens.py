"""Writes the tiny random targets and what transformers computes with them, in float32 on the CPU.

Run it with torch and transformers (see README.md), for all models or those named; the tests need neither. Each model
becomes a folder

    models/<name>/config.json, generation_config.json, model.safetensors    as `save_pretrained` writes them
    models/<name>/golden.npz    tokens, logits and block outputs, see `golden_arrays`
    models/<name>/long.npz      of hybrids: tokens [197] and logits [197, V], more than three chunks of the delta rule
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

OUT = pathlib.Path(__file__).parent / "models"
TOKENS, PREFIXES, BRANCH = 40, (24, 17), 6
LONG = 197
# Of hybrids, see `check_conditioning`; of the others their place in the list.
SEEDS = {"qwen3_5": 21, "qwen3_5_moe": 21, "qwen3_next": 21}

SMALL = dict(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=2, dtype=torch.float32)
# Widths differ from heads * head_dim wherever the family allows it: code that confuses the two cannot pass.
NARROW = dict(hidden_size=48, head_dim=16, intermediate_size=64, **SMALL)
WIDE = dict(hidden_size=64, intermediate_size=52, **SMALL)
SPARSE = dict(hidden_size=32, head_dim=12, intermediate_size=40, **SMALL)

# The context extensions start at 16 tokens, so that 40 tokens lie well inside the stretched region.
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=2.0, beta_slow=0.25)
EXTENDED = dict(original_max_position_embeddings=16)

# Half of a head rotates; widths of keys and values differ, and two value heads share a key head.
PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
HYBRID = NARROW | dict(
    hidden_size=32, intermediate_size=36, num_hidden_layers=4, rope_parameters=PARTIAL,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8,
)  # fmt: skip


def models() -> dict[str, transformers.PreTrainedModel]:
    """Every model of the suite, by folder name, with transformers' own initial weights."""
    t = transformers
    default = dict(rope_type="default", rope_theta=10000.0)
    million = dict(rope_type="default", rope_theta=1000000.0)
    return {
        "llama": t.LlamaForCausalLM(
            t.LlamaConfig(num_hidden_layers=3, rms_norm_eps=1e-5, head_dim=16, rope_parameters=default, **WIDE)
        ),
        "llama3_tied": t.LlamaForCausalLM(
            t.LlamaConfig(
                num_hidden_layers=3,
                rms_norm_eps=1e-5,
                rope_parameters=LLAMA3 | EXTENDED,
                tie_word_embeddings=True,
                **NARROW,
            )
        ),
        "qwen2": t.Qwen2ForCausalLM(t.Qwen2Config(num_hidden_layers=2, rope_parameters=million, **WIDE)),
        # The first layer sees everything, the other a window that the 40 tokens outgrow.
        "qwen2_window": t.Qwen2ForCausalLM(
            t.Qwen2Config(
                num_hidden_layers=2,
                rope_parameters=million,
                use_sliding_window=True,
                sliding_window=12,
                max_window_layers=1,
                tie_word_embeddings=True,
                **WIDE | dict(hidden_size=48),
            )
        ),
        "qwen3": t.Qwen3ForCausalLM(t.Qwen3Config(num_hidden_layers=4, rope_parameters=million, **NARROW)),
        "qwen3_yarn": t.Qwen3ForCausalLM(
            t.Qwen3Config(num_hidden_layers=2, rope_parameters=YARN | EXTENDED, attention_bias=True, **NARROW)
        ),
        # Experts in the first and the last layer; every pass touches nearly all of them.
        "qwen3_moe": t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                num_hidden_layers=3,
                rope_parameters=million,
                mlp_only_layers=[1],
                num_experts=8,
                num_experts_per_tok=3,
                norm_topk_prob=True,
                moe_intermediate_size=12,
                **SPARSE,
            )
        ),
        # Experts in every second layer, more than most passes touch; weights that do not sum to one.
        "qwen3_moe_plain": t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                num_hidden_layers=2,
                rope_parameters=million,
                decoder_sparse_step=2,
                num_experts=24,
                num_experts_per_tok=2,
                norm_topk_prob=False,
                moe_intermediate_size=8,
                **SPARSE,
            )
        ),
        "qwen3_5": t.Qwen3_5ForCausalLM(
            t.Qwen3_5TextConfig(
                **HYBRID | dict(rope_parameters=PARTIAL | dict(mrope_section=[2, 1, 1], mrope_interleaved=True))
            )
        ),
        # Every layer has experts, and a shared one that every token passes.
        "qwen3_5_moe": t.Qwen3_5MoeForCausalLM(
            t.Qwen3_5MoeTextConfig(
                num_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=12,
                shared_expert_intermediate_size=20,
                **{k: v for k, v in HYBRID.items() if k not in ("intermediate_size", "rope_parameters")},
                rope_parameters=PARTIAL | dict(mrope_section=[2, 1, 1], mrope_interleaved=True),
            )
        ),
        # Without experts every layer has the dense feed-forward block.
        "qwen3_next": t.Qwen3NextForCausalLM(t.Qwen3NextConfig(num_experts=0, **HYBRID)),
    }


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights under which every parameter matters: peaked attention, norms off 1, biases off 0, logits up to 10 (of
    hybrids up to 4, see `check_conditioning`)."""
    hybrid = hasattr(model.config, "linear_num_key_heads")
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            # Norms of hybrids multiply by 1 + weight, all but the gated one.
            zero_centred = hybrid and "linear_attn" not in name
            value = 0.2 * noise + (0.0 if zero_centred else 1.0)
        elif name.endswith("A_log"):
            # Heads that forget slowly, where what was long ago still counts, to heads that forget at once.
            value = torch.linspace(-5.0, 1.0, len(weight)) + 0.1 * noise
        elif name.endswith("dt_bias"):
            value = 0.5 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = (1.0 if hybrid and "lm_head" in name else 3.0) * noise / weight.shape[-1] ** 0.5
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            value = gain * noise / weight.shape[-1] ** 0.5
        weight.data.copy_(value)


@torch.no_grad()
def run(model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """tokens [B, N] -> logits [B, N, V] and the outputs of every block [layers, B, N, E], before the final norm."""
    # Hooks, because the last entry of transformers' `hidden_states` has the final norm applied.
    outputs = {}

    def keep(index):
        def hook(module, args, output):
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [block.register_forward_hook(keep(i)) for i, block in enumerate(model.model.layers)]
    logits = model(torch.from_numpy(tokens), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits.numpy(), np.stack([outputs[i].numpy() for i in range(len(hooks))])


def golden_arrays(model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two plain sequences, and for each a fork below a prefix of it.

    tokens [2, 40] int64; logits [2, 40, V]; blocks [layers, 2, 40, E].
    fork_prefix [2]: how many of `tokens` come before the fork. fork_tokens [2 slots, 2 branches, 6]: the branches agree
    in their first token and differ in all others. fork_logits, fork_blocks: what the model says at those tokens.
    """
    vocab = model.config.vocab_size
    tokens = rng.integers(3, vocab, (2, TOKENS))
    logits, blocks = run(model, tokens)
    branches = rng.integers(3, vocab, (2, 2, BRANCH))
    branches[:, 1, 0] = branches[:, 0, 0]
    branches[:, 1, 1:] = (branches[:, 0, 1:] + rng.integers(1, vocab - 3, (2, BRANCH - 1)) - 3) % (vocab - 3) + 3
    tails = []
    for slot, prefix in enumerate(PREFIXES):
        # A branch is run as a plain sequence of its own: nothing here knows about trees.
        whole = np.concatenate([np.tile(tokens[slot, :prefix], (2, 1)), branches[slot]], axis=1)
        fork_logits, fork_blocks = run(model, whole)
        tails.append((fork_logits[:, prefix:], fork_blocks[:, :, prefix:]))
    return dict(
        tokens=tokens, logits=logits, blocks=blocks,
        fork_prefix=np.array(PREFIXES), fork_tokens=branches,
        fork_logits=np.stack([t[0] for t in tails]), fork_blocks=np.stack([t[1] for t in tails], axis=1),
    )  # fmt: skip


@torch.no_grad()
def check_conditioning(model, tokens: np.ndarray, logits: np.ndarray) -> None:
    """The model one token at a time must say the same to well within the tolerance of the tests.

    A head whose output nearly cancels is blown up by the norm behind it; some seeds have one, and there transformers'
    own two forms of the delta rule part by several 1e-4.
    """
    cache, steps = None, []
    for i in range(tokens.shape[1]):
        out = model(torch.from_numpy(tokens[:, i : i + 1]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits.numpy())
    difference = np.abs(np.concatenate(steps, axis=1) - logits).max()
    assert difference < 5e-5, f"ill-conditioned: {difference:.1e} between the chunked and the recurrent form"


def main(wanted: list[str]) -> None:
    for seed, (name, model) in enumerate(models().items()):
        if wanted and name not in wanted:
            continue
        seed = SEEDS.get(name, seed)
        model.set_attn_implementation("eager")
        model.eval()
        randomise(model, torch.Generator().manual_seed(seed))
        model.save_pretrained(OUT / name)
        arrays = golden_arrays(model, np.random.default_rng(seed))
        if name in SEEDS:
            check_conditioning(model, arrays["tokens"], arrays["logits"])
        np.savez_compressed(OUT / name / "golden.npz", **arrays)
        if name in SEEDS:
            tokens = np.random.default_rng(seed + 100).integers(3, model.config.vocab_size, (1, LONG))
            logits = run(model, tokens)[0]
            check_conditioning(model, tokens, logits)
            np.savez_compressed(OUT / name / "long.npz", tokens=tokens[0], logits=logits[0])
        print(f"{name}: |logits| max {np.abs(arrays['logits']).max():.1f}, std {arrays['logits'].std():.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
