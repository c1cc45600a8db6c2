"""`python -m ddtree_jax static-tree`: the best static tree of N nodes for a target, a drafter and a kind of text."""

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from ddtree_jax.config import MAX_NODES, DecodeConfig
from ddtree_jax.evaluation import runs
from ddtree_jax.evaluation.ranks import comb_config, measure_ranks
from ddtree_jax.loading import load_drafter, load_target
from ddtree_jax.prepare import prepare
from ddtree_jax.tree import best_static_tree, rank_hits, replayed_length
from ddtree_jax.tree.best_static import UNKNOWN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="checkpoint of the target")
    add("--drafter", required=True, help="checkpoint of its drafter")
    add("--prompts", required=True, nargs="+", metavar="FILE.jsonl", help="prompts to measure on, first turns only")
    add("--num-nodes", type=int, default=64, help="nodes of the tree, root included")
    add("--out", required=True, metavar="TREE.json", help="the tree and what it was found from, for --tree-choices")
    add("--ranks", type=int, default=10, help="how many of the drafter's best tokens to look at, per depth")
    add("--draft-depth", type=int, help="tokens drafted a round; default: all that the drafter was trained for")
    add("--limit", type=int, help="only the first prompts of each file")
    add("--max-new-tokens", type=int, default=256, help="new tokens a prompt at most")
    add("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    add("--seed", type=int, default=0, help="of the draws at a temperature above 0")
    add("--no-chat", action="store_true", help="give prompts as they are, without the chat template")


def main(args: argparse.Namespace) -> int:
    if not 2 <= args.num_nodes <= MAX_NODES:
        raise ValueError(f"--num-nodes must be 2..{MAX_NODES}, root included; found {args.num_nodes}")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be 1 or more; found {args.limit}")
    out = Path(args.out)
    if out.is_dir() or not out.parent.is_dir():  # before the work, not after it
        raise ValueError(f"{out}: is no file in an existing folder")
    target = load_target(args.target)
    drafter = load_drafter(args.drafter, target)
    sets = runs.read_sets(args.prompts, args.limit)
    chat = not args.no_chat
    prompts = [q.prompt for name, records in sets.items() for q in runs.questions(name, records, 0, {}, chat)]
    base = DecodeConfig(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed, draft_depth=args.draft_depth,
        prompt_bucket=runs.longest_prompt(target, sets, 1, chat, args.max_new_tokens),
    )  # fmt: skip
    prepare(target, drafter, prompts, comb_config(base, drafter, args.ranks))  # refuse what cannot run
    console = Console(stderr=True)
    measured = measure_ranks(target, drafter, prompts, base, args.ranks)
    paths = [p for p in track(measured, "measuring", total=len(prompts), console=console) if p.size]
    if not paths:
        raise ValueError("no round was decoded: every text ended with its first token")
    found = find_tree(np.concatenate(paths), args.ranks, args.num_nodes)
    settings = {n: getattr(args, n) for n in ("target", "drafter", "temperature", "max_new_tokens", "draft_depth")}
    out.write_text(json.dumps(found | settings | {"prompts": len(prompts)}, indent=1))
    report(found, args.num_nodes, out, Console())
    return 0


def find_tree(paths: np.ndarray, ranks: int, num_nodes: int) -> dict:
    """The tree's file, less the settings. Raises ValueError if no drafted token was ever right.

    Args:
      paths: [rounds, L] int, see `rank_hits`.
    """
    hits = rank_hits(paths, ranks)
    choices, expected = best_static_tree(hits, num_nodes)
    whole = int((paths != UNKNOWN).all(axis=1).sum())
    if not choices:
        raise ValueError(f"no tree: in {len(paths)} rounds none of the drafter's {ranks} best tokens was right")
    return {
        "tree_choices": str(list(choices)),
        "num_nodes": 1 + len(choices),
        "expected_accepted_length": expected,
        "replayed_accepted_length": replayed_length(choices, paths) if whole else None,
        "replayed_rounds": whole,
        "rounds": len(paths),
        "hits": hits.tolist(),
    }


def report(found: dict, asked: int, out: Path, console: Console) -> None:
    console.print(found["tree_choices"], highlight=False, soft_wrap=True)
    line = f"{found['num_nodes']} nodes with the root; accepted length {found['expected_accepted_length']:.3f} expected"
    if found["replayed_rounds"]:
        line += (
            f", {found['replayed_accepted_length']:.3f} on those {found['replayed_rounds']} of the {found['rounds']} "
        )
        line += "rounds it was found from whose text goes on to the full depth"
    console.print(line, soft_wrap=True)
    if found["num_nodes"] < asked:
        console.print(
            f"No other node was ever right: there are fewer than the {asked} asked for. More prompts may help."
        )
    console.print(f"Written to {out}: use it with --method static_tree --tree-choices {out}", soft_wrap=True)
