"""From prompt files to stored answers: encoding, checks, answering, resuming."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ddtree_jax.loading import Target
from ddtree_jax.prompts import PromptRecord, encode_prompt, read_prompt_file
from ddtree_jax.tokenizer import Tokenizer
from ddtree_jax.train.answering import Question, answer, request_seed
from ddtree_jax.train.answers import Answer, AnswerStore, Manifest, digest_of, fingerprint
from ddtree_jax.train.config import TrainConfig
from ddtree_jax.train.data import Document
from ddtree_jax.train.progress import ProgressLine


def encode_files(target: Target, files: Sequence[str | Path], config: TrainConfig) -> list[list[int]]:
    """Token ids of the first turn of every prompt, in the target's chat template where it has one.

    Raises ValueError naming file and prompt: an empty or unreadable file, or (unless `prompt_overflow` is "skip") a
    prompt after which a row of `sequence_length` tokens, or the target's context, has no room for two tokens more.
    """
    most = min(config.sequence_length, target.config.max_position) - 2
    most = min(config.max_prompt_tokens or most, most)
    encoded, skipped = [], 0
    for file in files:
        records = read_prompt_file(file)
        for record, tokens in zip(records, _encode(target.tokenizer, file, records, config), strict=True):
            if len(tokens) <= most:
                encoded.append(tokens)
            elif config.prompt_overflow == "skip":
                skipped += 1
            else:
                raise ValueError(
                    f"{file}: prompt {record.id!r} has {len(tokens)} tokens, expected at most {most} "
                    f"(sequence_length {config.sequence_length}, max_prompt_tokens {config.max_prompt_tokens}, context "
                    f'{target.config.max_position}); raise them or set prompt_overflow = "skip"'
                )
    if not encoded:
        raise ValueError(f"{', '.join(map(str, files))}: no prompt is short enough ({skipped} skipped)")
    return encoded


def _encode(tokenizer: Tokenizer | None, file, records: Sequence[PromptRecord], config: TrainConfig) -> list[list[int]]:
    """Token ids of the first turn of each record."""
    if tokenizer is None or tokenizer.chat_template is None:
        return [_named(file, r, lambda r=r: encode_prompt(tokenizer, r.turns[0])) for r in records]
    render = lambda r: tokenizer.apply_chat_template(  # noqa: E731
        [{"role": "user", "content": r.turns[0]}], enable_thinking=config.thinking
    )
    texts = [_named(file, r, lambda r=r: render(r)) for r in records]
    try:
        return tokenizer.encode_rendered_many(texts)
    except ValueError:  # one by one, to find which
        encode = tokenizer.encode_rendered
        return [_named(file, r, lambda t=t: encode(t)) for r, t in zip(records, texts, strict=True)]


def _named(file: str | Path, record: PromptRecord, call: Callable[[], Any]) -> Any:
    """The call's result; its ValueError gets the names of file and prompt."""
    try:
        return call()
    except ValueError as error:
        raise ValueError(f"{file}: prompt {record.id!r}: {error}") from None


def answer_prompts(
    target: Target, prompts: Sequence[Sequence[int]], folder: str | Path, config: TrainConfig, *, temperature: float,
    longest: int = 0, minutes: float = 0.0, title: str = "answers", quiet: bool = False, reuse: bool = False,
) -> list[Document]:  # fmt: skip
    """The target's answers to encoded prompts at one temperature; those that `folder` lacks are made.

    Args:
      folder: see `train.answers`.
      longest: see `answering.answer`.
      minutes: time limit, 0 for none; at least one answer is needed.
      reuse: make none, take those that `folder` has.

    Raises:
      ValueError: the folder belongs to another target, other prompts or other settings.
      OSError: the disk is full or the like; finished shards are kept.
    """
    samples = config.samples if temperature > 0 else 1
    manifest = Manifest(
        target=fingerprint(target.config, target.params), prompts=digest_of(prompts), num_prompts=len(prompts),
        samples=samples, temperature=temperature, max_new_tokens=config.max_new_tokens, seed=config.seed,
        vocab_size=target.config.vocab_size,
    )  # fmt: skip
    if reuse and not (Path(folder) / "manifest.json").is_file():
        raise ValueError(f"{folder}: holds no answers, and none are made when they are to be reused")
    store = AnswerStore(folder, manifest)
    if reuse:
        documents = store.documents()
        if not documents:
            raise ValueError(f"{folder}: holds no finished answer, and none are made when they are to be reused")
        if not quiet:
            print(f"{title}: {len(documents)} of {manifest.num_requests} are there", file=sys.stderr, flush=True)
        return documents
    finished = store.finished()
    # A random order, so that a run cut short by the clock has seen every kind of prompt.
    order = np.random.default_rng([config.seed, manifest.num_requests]).permutation(manifest.num_requests).tolist()
    questions = [Question(r, prompts[r // samples], request_seed(config.seed, r)) for r in order if r not in finished]
    deadline = time.monotonic() + 60 * minutes if minutes else None
    unsaved: list[Answer] = []
    began, tokens, done = time.monotonic(), 0, len(finished)
    with ProgressLine(title, manifest.num_requests, quiet=quiet) as progress:
        for answers in answer(
            target.config, target.params, questions, temperature=temperature, max_new_tokens=config.max_new_tokens,
            slots=config.answer_slots, refill=config.answer_refill, longest=longest, deadline=deadline,
            devices=config.devices or jax.local_device_count(),
        ):  # fmt: skip
            unsaved += answers
            tokens, done = tokens + sum(len(a.tokens) for a in answers), done + len(answers)
            if len(unsaved) >= config.answers_per_shard:
                store.append(unsaved)
                unsaved = []
            progress.update(done, f"{tokens / (time.monotonic() - began):.0f} tokens/s")
        store.append(unsaved)
        if questions:
            seconds = time.monotonic() - began
            progress.note(f"{title}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s, {done} of "
                          f"{manifest.num_requests} answered")  # fmt: skip
    return store.documents()
