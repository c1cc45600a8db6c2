"""How a call decodes."""

import dataclasses

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. The text never depends on `method` and how it drafts, `batch_size`, `prefill_chunk` or
    `prompt_bucket`.

    Attributes:
      method: "autoregressive"; "lookup" and "lookup_tree" (what followed the last tokens where they occurred before:
        the first such continuation, or several merged in a tree); of a drafter "best_path" (its most probable chain,
        for DFlash also "dflash"), "static_tree" (its tokens by rank, in a tree fixed in advance), "ddtree" (DFlash: its
        N most probable prefixes) or "eagle2" (drafters that run once a depth: the tree grown from the best nodes).
      num_nodes: N, width of the tree, root included (ddtree, eagle2 and lookup_tree). Widths that fill tiles: 16, 32,
        64, 128, 256. "auto" (ddtree): rounds take the one of `widths` that pays best.
      widths: what "auto" chooses among.
      draft_depth: L, tokens drafted a round; None takes all that the drafter was trained for, 15 for a look-up.
      branching: children drafted of a node, and nodes drafted further at each depth (eagle2).
      tree_choices: the static tree: a list of tuples of child ranks such as ((0,), (1,), (0, 0)), its text, or the
        name of a published tree ("eagle-1", "medusa-vicuna-7b"); None takes "eagle-1" down to the drafter's depth.
      ngram: longest run of last tokens that a look-up looks for.
      max_new_tokens: new tokens a prompt, the stop token included.
      temperature: 0 for the most probable token, else draws from softmax(logits / temperature).
      seed: of the draws; one for all prompts, or one each. A draw depends on (seed, absolute position) alone.
      stop_token_ids: what ends a text; None takes the checkpoint's, () nothing.
      capacity: longest text in tokens, prompt included; None takes what the prompts and `max_new_tokens` need, up to
        the longest context that the target declares.
      batch_size: prompts decoded at a time; None takes all of them, at most 8.
      prefill_chunk: prompt tokens a pass.
      prompt_bucket: pad prompts to at least this many tokens, so that several calls share one executable.
    """

    method: str = "ddtree"
    num_nodes: int | str = 64
    widths: tuple[int, ...] = (16, 32, 64, 128)
    draft_depth: int | None = None
    branching: int = 10
    tree_choices: str | tuple[tuple[int, ...], ...] | None = None
    ngram: int = 3
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | tuple[int, ...] = 0
    stop_token_ids: tuple[int, ...] | None = None
    capacity: int | None = None
    batch_size: int | None = None
    prefill_chunk: int = 256
    prompt_bucket: int = 0
