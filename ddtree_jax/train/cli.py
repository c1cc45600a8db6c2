"""`python -m ddtree_jax train`: prompts in, drafter out."""

import argparse
import dataclasses
import errno
import json
import shutil
import sys
import time
from pathlib import Path

from ddtree_jax.checkpoint import save_checkpoint
from ddtree_jax.loading import Target, load_target
from ddtree_jax.train.config import TrainConfig, drafter_config, load_config
from ddtree_jax.train.data import Document, Rows, pack
from ddtree_jax.train.parallel import row_mesh
from ddtree_jax.train.prepare import answer_prompts, encode_files
from ddtree_jax.train.trainer import Trained, check_fresh, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the `train` command to `parser`."""
    parser.add_argument("--target", required=True, help="folder of the target, from `python -m convert target`")
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE.jsonl", help='lines {"id", "turns"}')
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--config", required=True, metavar="FILE", help="settings, TOML or JSON; see TrainConfig")
    parser.add_argument("--eval-prompts", nargs="+", default=[], metavar="FILE.jsonl", help="held-out prompts")
    parser.add_argument("--temperature", nargs="+", type=float, metavar="T", help="temperatures of the answers")
    parser.add_argument("--answers", help="folder of the answers, to share between runs; default OUT/answers")
    parser.add_argument("--answers-only", action="store_true", help="stop after answering")
    parser.add_argument("--reuse-answers", action="store_true", help="make no answers, take those that are there")
    parser.add_argument("--max-minutes", type=float, help="time limit of training")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUT")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def main(args: argparse.Namespace) -> int:
    """Runs the `train` command. Returns the exit code; an error is one line on stderr."""
    try:
        run(args)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = " (everything written before is intact; free space and run again with --resume)"
        reason = (error.strerror or str(error)) + (full if error.errno == errno.ENOSPC else "")
        print(f"error: {where}{reason}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; run again with --resume to go on", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> Trained | None:
    """The `train` command without its error handling. Raises ValueError and OSError."""
    overrides = {"temperatures": args.temperature, "max_minutes": args.max_minutes}
    config = load_config(args.config, {k: v for k, v in overrides.items() if v is not None})
    target = load_target(args.target)
    # Whether all this fits is known before hours of answering.
    drafter_config(config, target.config)
    row_mesh(config.batch_size, config.devices)
    if not args.answers_only:
        check_fresh(args.out, args.resume)
    out, answers = Path(args.out), Path(args.answers or Path(args.out) / "answers")
    prompts = encode_files(target, args.prompts, config)
    held = {Path(f).stem: encode_files(target, [f], _eval_config(config)) for f in args.eval_prompts}
    documents = _answer(target, prompts, held, answers, config, args.quiet, args.reuse_answers)
    if args.answers_only:
        return None
    rows = pack(documents.pop("train"), config.sequence_length)
    eval_rows = _eval_rows(documents, config)
    if not args.quiet:
        print(f"{len(rows)} rows of {config.sequence_length} tokens, {100 * rows.fill:.0f} % full, "
              f"{int(rows.labels.sum())} answer tokens", file=sys.stderr)  # fmt: skip
    trained = train(target, rows, config, out, eval_rows=eval_rows, resume=args.resume, quiet=args.quiet)
    export(trained, config, out)
    return trained


def export(trained: Trained, config: TrainConfig, out: Path) -> None:
    """Writes OUT/drafter (checkpoint of this package) and OUT/z-lab (safetensors in the z-lab format)."""
    summary = {"train": config.to_json(), "steps": trained.steps}
    for name in ("report", "evaluation"):
        value = getattr(trained, name)
        summary[name] = None if value is None else dataclasses.asdict(value)
    files = {"training.json": json.dumps(summary, indent=2).encode()}
    save_checkpoint(
        out / "drafter", trained.config, trained.params, files, source="python -m ddtree_jax train", overwrite=True
    )
    try:
        from convert.export import export_drafter
    except ImportError as error:
        print(f"note: {out / 'z-lab'} was not written: {error}", file=sys.stderr)
        return
    shutil.rmtree(out / "z-lab", ignore_errors=True)  # of an earlier end of this run
    export_drafter(trained.config, trained.params, out / "z-lab")


def _eval_config(config: TrainConfig) -> TrainConfig:
    """Held-out prompts that are too long are left out: they are not what is being trained on."""
    return dataclasses.replace(config, prompt_overflow="skip")


def _answer(
    target: Target, prompts, held, folder: Path, config: TrainConfig, quiet: bool, reuse: bool
) -> dict[str, list[Document]]:
    """Answers at every temperature: "train" all together, held-out ones all together by temperature."""
    deadline = time.monotonic() + 60 * config.answer_minutes
    questions = [p for name in held for p in _spread(held[name], config.eval_answers, len(held))]
    longest = max(map(len, [*prompts, *questions]))
    documents: dict[str, list[Document]] = {"train": []}
    for place, temperature in enumerate(config.temperatures):
        name = f"t{temperature:g}"
        if questions:
            documents[f"held-{name}"] = answer_prompts(
                target, questions, folder / f"held-{name}", config, temperature=temperature, longest=longest,
                title=f"held-out answers at temperature {temperature:g}", quiet=quiet, reuse=reuse,
            )  # fmt: skip
        left = max(0.05, (deadline - time.monotonic()) / 60) / (len(config.temperatures) - place)
        documents["train"] += answer_prompts(
            target, prompts, folder / f"train-{name}", config, temperature=temperature, quiet=quiet, longest=longest,
            minutes=left if config.answer_minutes else 0.0, title=f"answers at temperature {temperature:g}",
            reuse=reuse,
        )  # fmt: skip
    return documents


def _spread(prompts: list[list[int]], total: int, sets: int) -> list[list[int]]:
    """This set's share of `total` prompts, evenly over the set."""
    share = min(len(prompts), max(1, total // sets))
    return [prompts[i * len(prompts) // share] for i in range(share)]


def _eval_rows(documents: dict[str, list[Document]], config: TrainConfig) -> dict[str, Rows]:
    return {name: pack(texts, config.sequence_length) for name, texts in documents.items()}
