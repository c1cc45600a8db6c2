"""`python -m ddtree_jax evaluate`: accepted lengths and speed of methods and widths on prompt files."""

import argparse
import json
import sys
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ddtree_jax.api import compile_ahead
from ddtree_jax.commands.options import (
    add_drafting,
    parse_num_nodes,
    parse_widths,
    read_trees,
    unused_options,
)
from ddtree_jax.config import DecodeConfig, possible_methods
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.evaluation import runs
from ddtree_jax.evaluation.plots import plot_all
from ddtree_jax.evaluation.summary import COLUMNS, best_widths, cells, markdown, summarise
from ddtree_jax.evaluation.variants import variants
from ddtree_jax.loading import load_drafter, load_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="checkpoint of the target")
    add("--drafter", help="checkpoint of its drafter")
    add("--prompts", required=True, nargs="+", metavar="FILE.jsonl", help='lines {"id": ..., "turns": [...]}')
    add("--methods", help="comma-separated, the first is the baseline of the speed-up; default: all that are possible")
    add_drafting(parser, widths="16,32,64,128")
    add("--out", required=True, metavar="FOLDER", help="gets records.jsonl, summary.json, summary.md and plots")
    add("--limit", type=int, help="only the first prompts of each file")
    add("--turns", type=int, default=1, help="turns of a conversation at most")
    add("--max-new-tokens", type=int, default=256, help="new tokens a prompt at most")
    add("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    add("--seed", type=int, default=0, help="of the draws at a temperature above 0")
    add("--batch-size", type=int, default=1, help="prompts decoded at a time")
    add("--no-chat", action="store_true", help="give prompts as they are, without the chat template")
    add("--compile-workers", type=int, default=4, help="programs compiled at a time")


def main(args: argparse.Namespace) -> int:
    for name in ("limit", "turns", "compile_workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more; found {getattr(args, name)}")
    num_nodes, widths = parse_num_nodes(args.num_nodes), parse_widths(args.widths)
    target = load_target(args.target)
    drafter = load_drafter(args.drafter, target) if args.drafter else None
    sets = runs.read_sets(args.prompts, args.limit)
    chat = not args.no_chat
    longest = runs.longest_prompt(target, sets, args.turns, chat, args.max_new_tokens)
    base = DecodeConfig(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed, batch_size=args.batch_size,
        prompt_bucket=longest, draft_depth=args.draft_depth, branching=args.branching,
        ngram=args.ngram, widths=widths,
    )  # fmt: skip
    methods = args.methods.split(",") if args.methods else possible_methods(drafter.config if drafter else None)
    todo = variants(methods, num_nodes, read_trees(args.tree_choices), base, target, drafter)
    for variant in todo:  # refuse what cannot run before anything is written or compiled
        make_plan(variant.config(base), target.config, drafter.config if drafter else None, [longest])
    results = runs.Results(args.out, _settings(args, target))
    if note := unused_options(args, methods):
        print(note, file=sys.stderr)
    console = Console(stderr=True)
    if configs := [v.config(base) for v in todo if runs.unfinished(v, sets, results, args.turns)]:
        with console.status(f"compiling {len(configs)} programs"):
            seconds = compile_ahead(
                target, drafter, configs, prompt_length=longest, batch=args.batch_size, workers=args.compile_workers
            )
        console.print(f"compiled {len(configs)} programs in {seconds:.0f} s")

    total = len(todo) * sum(
        sum(t < len(r.turns) for t in range(args.turns)) for records in sets.values() for r in records
    )
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        runs.run_all(
            target, drafter, sets, todo, base, results, turns=args.turns, chat=chat,
            progress=lambda done: bar.advance(task, done),
        )  # fmt: skip
    # What this call asked for: a folder may hold more, of other prompts, which must not be averaged with it.
    asked = {(name, record.id) for name, records in sets.items() for record in records}
    names = {variant.name for variant in todo}
    rows = [
        r for r in results.records
        if (r["set"], r["id"]) in asked and r["variant"] in names and r["turn"] < args.turns
    ]  # fmt: skip
    report(rows, todo[0].name, Path(args.out), best_width=args.best_width)
    return 0


def report(records: list[dict], baseline: str, folder: Path, *, best_width: bool) -> None:
    """Writes and prints the summary; tables with each method at its best width only if asked."""
    rows = summarise(records, baseline)
    shown = best_widths(rows) if best_width else rows
    (folder / "summary.json").write_text(json.dumps(rows, indent=1))
    (folder / "summary.md").write_text(markdown(shown))
    try:
        plot_all(rows, folder)
    except ImportError as error:
        print(f"note: no plots: {error} (pip install ddtree-jax[demo])", file=sys.stderr)
    table = Table(title=jax.devices()[0].device_kind)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("set", "variant") else "right", no_wrap=True)
    for row in shown:
        table.add_row(*cells(row), end_section=row is shown[-1])
    Console(width=max(110, Console().width)).print(table)


def _settings(args: argparse.Namespace, target) -> dict:
    """What must agree for two runs to share a folder. Methods, widths, trees, files and limits may grow."""
    names = ("target", "drafter", "turns", "max_new_tokens", "temperature", "seed", "batch_size", "no_chat")
    drafting = {name: value for name in ("draft_depth", "branching", "ngram")
                if (value := getattr(args, name)) != getattr(DecodeConfig, name)}  # fmt: skip
    device = {"device": jax.devices()[0].device_kind, "dtype": target.config.dtype}
    checkpoints = runs.fingerprints(target=args.target, drafter=args.drafter)
    return {name: getattr(args, name) for name in names} | drafting | device | checkpoints
