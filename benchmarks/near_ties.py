"""Where two methods' texts part in bfloat16: is the target undecided there?

  python -m benchmarks.near_ties --results results --target TARGET_FLOAT32 --prompts data/prompts/eval_*.jsonl

Reads the records of `python -m ddtree_jax evaluate` and, at the first new token where a variant's text leaves that of
the first variant, prints the margin between the two best logits of a float32 target given the common text, and
whether the two texts go on with exactly these two tokens. First turns only.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import load_target
from ddtree_jax.evaluation.runs import read_sets
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.prompts import encode_prompt
from ddtree_jax.tree import static_bits

ROWS = 512  # every text is padded to this, so one program serves all; longer ones are left out


@functools.partial(jax.jit, static_argnums=0)
def top_two(decoder: Decoder, params, tokens: jax.Array, length: jax.Array):
    """The two best logits after the first `length` of tokens [1, ROWS], and their ids."""
    c = decoder.config
    cache = KVCache.empty(c, batch=1, rows=8)
    positions = jnp.arange(ROWS, dtype=jnp.int32)[None]
    causal = jnp.asarray(static_bits(np.tri(ROWS, dtype=bool)))[None]
    hidden = decoder.apply({"params": params}, tokens, positions, causal, cache).hidden
    last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)[:, 0]
    return jax.lax.top_k(decoder.apply({"params": params}, last, method=Decoder.logits)[0], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", required=True, type=Path)
    parser.add_argument("--target", required=True, help="the same target, converted with --dtype float32")
    parser.add_argument("--prompts", required=True, nargs="+")
    parser.add_argument("--variant", default="ddtree-64")
    parser.add_argument("--limit", type=int, help="partings at most")
    args = parser.parse_args()

    target = load_target(args.target)
    decoder = Decoder(target.config)
    prompts = {(name, r.id): r.turns[0] for name, records in read_sets(args.prompts, None).items() for r in records}
    lines = (args.results / "records.jsonl").read_text(encoding="utf-8").split("\n")
    records = [r for r in map(json.loads, filter(None, lines)) if r["turn"] == 0]
    base = {(r["set"], r["id"]): r["tokens"] for r in records if r["variant"] == records[0]["variant"]}
    margins, swaps = [], 0
    for record in (r for r in records if r["variant"] == args.variant):
        key = record["set"], record["id"]
        ours, theirs = record["tokens"], base[key]
        parting = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
        if parting is None or len(margins) == args.limit:
            continue
        text = encode_prompt(target.tokenizer, [{"role": "user", "content": prompts[key]}]) + theirs[:parting]
        if len(text) > ROWS:
            continue
        tokens = np.zeros((1, ROWS), np.int32)
        tokens[0, : len(text)] = text
        logits, best = top_two(decoder, target.params, tokens, np.int32(len(text)))
        margins.append(float(logits[0] - logits[1]))
        swap = set(best.tolist()) == {ours[parting], theirs[parting]}
        swaps += swap
        print(f"{key[0]} {key[1]}: new token {parting}, margin {margins[-1]:.4f}, {'swap' if swap else 'other tokens'}")
    if margins:
        print(f"{len(margins)} partings, {swaps} of them swaps of the two best tokens; margin: median "
              f"{statistics.median(margins):.3f}, largest {max(margins):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
