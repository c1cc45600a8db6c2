"""Writes moe_block.npz: what transformers' mixture-of-experts block of Qwen3.5 computes, in float32 on the CPU.

Arrays: x and out [2, 9, E]; experts and weights [18, k], the routing; the weights of the block under their names in a
checkpoint.
"""

import pathlib

import numpy as np
import torch
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

OUT = pathlib.Path(__file__).parent / "moe_block.npz"


@torch.no_grad()
def main() -> None:
    config = Qwen3_5MoeTextConfig(
        hidden_size=24, num_experts=10, num_experts_per_tok=3, moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = Qwen3_5MoeSparseMoeBlock(config).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in block.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    x = torch.randn((2, 9, config.hidden_size), generator=generator)
    _, weights, experts = block.gate(x)
    arrays = {name: weight.numpy() for name, weight in block.named_parameters()}
    arrays |= dict(x=x.numpy(), out=block(x).numpy(), experts=experts.numpy(), weights=weights.numpy())
    np.savez_compressed(OUT, **arrays)
    print({name: array.shape for name, array in arrays.items()}, f"|out| max {np.abs(arrays['out']).max():.2f}")


if __name__ == "__main__":
    main()
