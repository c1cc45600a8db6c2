"""Prompts that the target writes itself (Magpie, arXiv 2406.08464, section 2).

A chat model that is given its template up to the place where the user speaks goes on as a user would. That yields as
many prompts as one likes, spread like those that the model was tuned on: where prompt files are few, a drafter would
learn their answers by heart.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ddtree_jax.loading import Target
from ddtree_jax.prompts import read_prompt_file
from ddtree_jax.tokenizer import Tokenizer
from ddtree_jax.train.answering import Question, answer, request_seed

_MARK = "\u2402user\u2402"  # stands for the user's words while the template is rendered
_WORD = re.compile(r"\w+")
# A prompt that shares this many words in a row with an excluded one counts as the same.
OVERLAP_WORDS = 8
MIN_CHARACTERS = 8


def user_prefix(tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of the chat template up to the user's first word. Raises ValueError where there is no such place."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError("writing prompts needs a target with a chat template, and this one has none")
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, mark, _ = text.partition(_MARK)
    if not mark or not before:
        raise ValueError("the chat template does not show where the user's words begin")
    return tokenizer.encode_rendered(before)


def words_in_a_row(text: str, count: int = OVERLAP_WORDS) -> set[tuple[str, ...]]:
    """All runs of `count` words, case and punctuation aside; a shorter text is one run."""
    words = _WORD.findall(text.lower())
    return {tuple(words[i : i + count]) for i in range(max(1, len(words) - count + 1))} if words else set()


@dataclasses.dataclass
class PromptFilter:
    """Lets a prompt through once, if it is not one of those to keep apart.

    Attributes:
      excluded: runs of words, see `words_in_a_row`.
      seen: prompts that passed.
    """

    excluded: set[tuple[str, ...]] = dataclasses.field(default_factory=set)
    seen: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def without(cls, files: Iterable[str | Path]) -> "PromptFilter":
        """Keeps prompts like those of prompt files (all turns) out."""
        runs: set[tuple[str, ...]] = set()
        for file in files:
            for record in read_prompt_file(file):
                runs.update(*(words_in_a_row(turn) for turn in record.turns))
        return cls(runs)

    def __call__(self, text: str) -> bool:
        fresh = len(text) >= MIN_CHARACTERS and text not in self.seen
        if not fresh or not self.excluded.isdisjoint(words_in_a_row(text)):
            return False
        self.seen.add(text)
        return True


def write_prompts(
    target: Target, count: int, allowed: PromptFilter, *, temperature: float = 1.0, max_tokens: int = 160,
    seed: int = 0, slots: int = 256, refill: int = 64, devices: int = 1, deadline: float | None = None,
) -> Iterator[list[tuple[int, str]]]:  # fmt: skip
    """Yields prompts that the target wrote, as (number of the draw, text), a few at a time; fewer than `count` in all,
    as those without an end, those seen before and those that `allowed` stops are dropped.

    Args:
      count: draws.
      temperature, max_tokens: of a prompt; one that is longer is dropped, not cut.
      seed: of all draws; draw number i depends on (seed, i) alone.
      slots, refill, devices, deadline: see `answering.answer`.

    Raises:
      ValueError: no chat template, or no stop token that would end a prompt.
    """
    stops = set(target.config.stop_token_ids)
    if not stops:
        raise ValueError("writing prompts needs a target with a stop token, and this one has none")
    prefix = user_prefix(target.tokenizer)
    questions = [Question(i, prefix, request_seed(seed, i)) for i in range(count)]
    for answers in answer(
        target.config, target.params, questions, temperature=temperature, max_new_tokens=max_tokens + 1,
        slots=slots, refill=refill, deadline=deadline, devices=devices,
    ):  # fmt: skip
        whole = [(a.request, a.tokens[:-1]) for a in answers if a.tokens[-1] in stops]
        texts = [(request, target.tokenizer.decode(tokens).strip()) for request, tokens in whole]
        if kept := [(request, text) for request, text in texts if allowed(text)]:
            yield kept


def prompt_lines(prompts: Sequence[tuple[int, str]]) -> str:
    """Lines of a prompt file."""
    return "".join(json.dumps({"id": f"self-{number}", "turns": [text]}) + "\n" for number, text in prompts)
