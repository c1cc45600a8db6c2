"""config.json of one tiny drafter in each published format, for a target of 9 layers."""

import synthetic_checkpoints as synthetic

TARGET_LAYERS = 9
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
INNER = {"mask_token_id": 39, "target_layer_ids": [2, 7]}


def qwen3(**changes):
    """The layers alone, as a Qwen3 config describes them."""
    config = synthetic.drafter_json()
    for key in ("num_target_layers", "block_size", "dflash_config", "architectures"):
        del config[key]
    return {**config, **changes}


def z_lab(inner=None, **changes):
    """Newer revisions: settings inside `dflash_config`."""
    config = qwen3(architectures=["DFlashDraftModel"], num_target_layers=TARGET_LAYERS)
    return {**config, "dflash_config": INNER | {"block_size": 4} | (inner or {}), **changes}


def flat(**changes):
    """Older revisions and the Muse assistant: everything at the top level."""
    config = qwen3(architectures=["DFlashDraftModel"], num_target_layers=TARGET_LAYERS)
    return {**config, **INNER, "block_size": 4, **changes}


def speculators(model=None, **changes):
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": qwen3(**(model or {})),
        "aux_hidden_state_layer_ids": [3, 8],
        "mask_token_id": 39,
        "block_size": 4,
        "draft_vocab_size": synthetic.VOCAB,
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "x/y", "architectures": ["Qwen3ForCausalLM"]},
        },
        **changes,
    }


def speculators_2(model=None, **changes):
    """DFlash 2: its sizes are written out as well, convolutions of 2 taps over groups of 4, a selector of rank 3."""
    config = speculators(model)
    return {
        **config,
        "speculators_model_type": "dflash2",
        "architectures": ["DFlash2DraftModel"],
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 3,
        "selector_top_k": 5,
        "speculators_config": config["speculators_config"] | {"algorithm": "dflash2"},
        **changes,
    }


def open_spec(inner=None, **changes):
    settings = {
        "method": "dflash", "speculative_tokens": 3, "target_layer_ids": [3, 8], "target_layer_start_idx": 1,
        "sample_from_anchor": False, "mask_token_id": 39, "sliding_window_non_causal": False,
        "draft_vocab_size": synthetic.VOCAB,
    }  # fmt: skip
    settings = settings | (inner or {})
    mark = {"architectures": ["DflashDraftModel"], "open_spec_config_version": "0.0.0"}
    return {**qwen3(), **mark, "speculative_config": settings, **changes}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}
