"""`python -m ddtree_jax generate`: text, tokens/s, rounds and mean accepted length, for one method or all of them."""

import argparse
import itertools
import json
import statistics
import sys
from collections import Counter

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddtree_jax.api import Generation
from ddtree_jax.api import generate as run
from ddtree_jax.commands.options import (
    add_drafting,
    parse_num_nodes,
    parse_widths,
    read_trees,
    unused_options,
)
from ddtree_jax.config import AUTO, METHODS, DecodeConfig, possible_methods
from ddtree_jax.evaluation.variants import Variant, variants
from ddtree_jax.loading import Drafter, Target, load_drafter, load_target
from ddtree_jax.prepare import prepare
from ddtree_jax.prompts import Prompt, read_prompt_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="checkpoint of the target (python -m convert target)")
    add("--drafter", help="checkpoint of its drafter (python -m convert drafter)")
    add("--method", default="ddtree", choices=[*METHODS, "all"], help='"all" prints all that are possible side by side')
    add_drafting(parser, widths="64")
    add("--prompt", action="append", default=[], help="a prompt; may be given several times")
    add("--prompts", help='file of prompts, one {"id": ..., "turns": [...]} a line; the first turn is decoded')
    add("--chat", action="store_true", help="wrap prompts in the target's chat template")
    add("--limit", type=int, help="only the first prompts of the file")
    add("--max-new-tokens", type=int, default=128, help="new tokens a prompt at most")
    add("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    add("--seed", type=int, default=0, help="of the draws at a temperature above 0; one seed gives one text")
    add("--capacity", type=int, help="longest text in tokens, prompt included")
    add("--batch-size", type=int, default=1, help="prompts decoded at a time")
    add("--json", action="store_true", help="one JSON line a prompt and method, and nothing else")


def collect_prompts(args: argparse.Namespace) -> tuple[list[str], list[Prompt]]:
    """(ids, prompts) from the command line. Raises ValueError if there are none."""
    ids, prompts = [], []
    for i, text in enumerate(args.prompt):
        ids.append(f"prompt-{i}")
        prompts.append(text)
    if args.prompts:
        if args.limit is not None and args.limit < 1:
            raise ValueError(f"--limit must be 1 or more; found {args.limit}")
        records = read_prompt_file(args.prompts)
        for record in records[: args.limit]:
            ids.append(record.id)
            prompts.append(record.turns[0])
    if not prompts:
        raise ValueError("give --prompt or --prompts")
    if args.chat:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    return ids, prompts


def decode_config(args: argparse.Namespace) -> DecodeConfig:
    """The settings that all methods share."""
    return DecodeConfig(
        draft_depth=args.draft_depth,
        branching=args.branching,
        ngram=args.ngram,
        widths=parse_widths(args.widths),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        capacity=args.capacity,
        batch_size=args.batch_size,
    )


def to_record(out: Generation, i: int, prompt_id: str, variant: Variant) -> dict:
    """One prompt of a generation as JSON."""
    lengths = out.accepted_lengths[i]
    return {
        "id": prompt_id,
        "variant": variant.name,
        "method": variant.method,
        "num_nodes": variant.num_nodes,
        "text": out.text[i] if out.text is not None else None,
        "tokens": out.tokens[i],
        "finish_reason": out.finish_reasons[i],
        "prompt_tokens": out.prompt_lengths[i],
        "new_tokens": len(out.tokens[i]),
        "rounds": out.rounds[i],
        "accepted_lengths": lengths,
        "mean_accepted_length": statistics.fmean(lengths) if lengths else None,
    } | ({} if out.widths is None else {"widths": out.widths[i]})


def summary_table(results: dict[str, Generation]) -> Table:
    """Methods side by side; the first row is the baseline of the speed-up. "accepted" is the mean accepted length."""
    count = len(next(iter(results.values())).tokens)
    prompts = f"{count} prompt{'s' if count > 1 else ''}"
    table = Table(title=f"{prompts} on {jax.devices()[0].device_kind}, compile time excluded")
    columns = ["method", "tokens", "rounds", "accepted", "tokens/s", *(["speed-up"] if len(results) > 1 else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    base = next(iter(results.values())).tokens_per_second
    for method, out in results.items():
        accepted = out.mean_accepted_length
        cells = [
            method, str(sum(map(len, out.tokens))), str(sum(out.rounds)),
            "-" if accepted != accepted else f"{accepted:.2f}", f"{out.tokens_per_second:.1f}",
            f"{out.tokens_per_second / base:.2f}x",
        ]  # fmt: skip
        table.add_row(*cells[: len(columns)])
    return table


def compare(results: dict[str, Generation]) -> str:
    """Whether all methods wrote the same tokens, and where the first pair parts if not."""
    (base_name, base), *others = results.items()
    for name, out in others:
        for i, (a, b) in enumerate(zip(base.tokens, out.tokens)):
            if a != b:
                at = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                return f"texts differ: {base_name} and {name} part at prompt {i}, new token {at}"
    return "all methods wrote the same text"


def shares(widths: list[list[int]]) -> str:
    """Such as "16 nodes in 75%, 64 nodes in 25% of rounds"."""
    counts = Counter(itertools.chain(*widths))
    share = {width: counts[width] / counts.total() for width in sorted(counts)}
    return ", ".join(f"{width} nodes in {part:.0%}" for width, part in share.items()) + " of rounds"


def verdict(target: Target, results: dict[str, Generation]) -> list[str]:
    """What to say under a table: widths chosen, whether the texts agree, and what a CPU's speeds mean."""
    lines = [f"{name}: {shares(out.widths)}" for name, out in results.items() if any(out.widths or ())]
    if len(results) > 1:
        agreement, dtype = compare(results), target.config.dtype
        lines.append(f"[bold]{agreement}[/bold]")
        if dtype != "float32" and "differ" in agreement:
            lines.append(f"In {dtype}, matrices of other shapes may flip a near-tie; in float32 the texts are equal.")
    if jax.default_backend() == "cpu":
        lines.append("On a CPU a pass over N nodes takes about N times as long as one token, so drafting does not pay "
                     "here; rounds and accepted lengths are those of a GPU.")  # fmt: skip
    return lines


def run_methods(
    target: Target, drafter: Drafter | None, prompts: list[Prompt], configs: dict[str, DecodeConfig], console: Console
) -> dict[str, Generation]:
    """Decodes with each of `configs`, saying on `console` what takes the time."""
    for config in configs.values():  # refuse what cannot run before anything compiles
        prepare(target, drafter, prompts, config)
    results = {}
    for name, config in configs.items():
        doing = "compiling, measuring widths and decoding" if config.num_nodes == AUTO else "compiling and decoding"
        with console.status(f"{name}: {doing} (a new shape takes a minute or so to compile)"):
            results[name] = run(target, drafter, prompts, config)
        console.print(f"{name}: compiled in {results[name].compile_seconds:.1f} s, ran {results[name].seconds:.1f} s")
    return results


def fastest_widths(results: dict[str, Generation], todo: list[Variant]) -> list[Variant]:
    """Each method at the width that made the most tokens a second, in the order of `todo`."""
    best: dict[str, Variant] = {}
    for v in todo:
        if v.method not in best or results[v.name].tokens_per_second > results[best[v.method].name].tokens_per_second:
            best[v.method] = v
    return list(best.values())


def main(args: argparse.Namespace) -> int:
    ids, prompts = collect_prompts(args)
    widths, trees, base = parse_num_nodes(args.num_nodes), read_trees(args.tree_choices), decode_config(args)
    if args.method != "all" and METHODS[args.method].needs_drafter and args.drafter is None:
        raise ValueError(f"--method {args.method} needs --drafter")
    target = load_target(args.target)
    drafter = load_drafter(args.drafter, target) if args.drafter else None
    methods = possible_methods(drafter.config if drafter else None) if args.method == "all" else [args.method]
    todo = variants(methods, widths, trees, base, target, drafter)
    configs = {v.name: v.config(base) for v in todo}
    if note := unused_options(args, methods):
        print(note, file=sys.stderr)
    results = run_methods(target, drafter, prompts, configs, Console(stderr=True, quiet=args.json))
    if args.best_width:
        todo = fastest_widths(results, todo)
    if args.json:
        for v in todo:
            out = results[v.name]
            for i, prompt_id in enumerate(ids):
                speed = {"tokens_per_second": out.tokens_per_second, "compile_seconds": out.compile_seconds}
                print(json.dumps(to_record(out, i, prompt_id, v) | speed, ensure_ascii=False))
        return 0

    console = Console(file=sys.stdout, soft_wrap=True)
    shown = results[todo[-1].name]
    for i, prompt_id in enumerate(ids):
        text = shown.text[i] if shown.text is not None else str(shown.tokens[i])
        console.print(f"[bold]{escape(prompt_id)}[/bold] ({shown.finish_reasons[i]})")
        console.print(escape(text) + "\n", highlight=False)
    console.print(summary_table({v.name: results[v.name] for v in todo}))
    for line in verdict(target, results):
        console.print(line)
    return 0
