"""Answers many prompts with the decode loop: a free slot gets the next prompt, no batch waits for its longest text.

A text depends on (seed, absolute position) alone, not on the slot or the company: refilling changes no answer.

Shape letters: B slots, R slots of a refill, S prompt rows, O rows of the output buffer.
"""

import collections
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import TargetConfig
from ddtree_jax.decode import run as device
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.plan import ROW_TILE
from ddtree_jax.decode.proposers import NoDraft
from ddtree_jax.decode.state import DecodeState, Request
from ddtree_jax.models.cache import put_slots
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.train.answers import Answer

_MAX_CHUNK = 256
# Tokens between two looks of the host at which slots are done: it costs a round trip, a done slot waits for the next.
_ROUNDS_PER_LOOK = 16


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt to answer: number of the request, token ids, seed of the draws."""

    request: int
    prompt: Sequence[int]
    seed: int


def answer(
    config: TargetConfig, params: Any, questions: Sequence[Question], *, temperature: float, max_new_tokens: int,
    slots: int, refill: int, longest: int = 0, deadline: float | None = None, devices: int = 1,
) -> Iterator[list[Answer]]:  # fmt: skip
    """Yields finished answers, a few at a time, in the order in which they finish.

    Args:
      config, params: of the target.
      temperature, max_new_tokens: see `DecodeConfig`. An answer includes its stop token.
      slots, refill: B and R, of each device.
      longest: longest prompt to make room for, if later calls bring more prompts: equal shapes share programs.
      deadline: `time.monotonic()` at which to give up; what is unfinished then is dropped.
      devices: of this host that share the questions.

    Raises:
      ValueError: a prompt leaves no room for an answer in the target's context.
    """
    if not questions:
        return
    for q in questions:
        if not 0 < len(q.prompt) < config.max_position:
            raise ValueError(f"request {q.request}: the prompt has {len(q.prompt)} tokens, "
                             f"expected 1..{config.max_position - 1}")  # fmt: skip
    longest = max(longest, *(len(q.prompt) for q in questions))
    waiting = collections.deque(questions)

    def on(device: jax.Device | None) -> Iterator[list[Answer]]:
        """Answers on one device until nothing waits any more; the queue is shared."""
        with contextlib.nullcontext() if device is None else jax.default_device(device):
            own = params if device is None else jax.device_put(params, device)
            batch = _Batch(config, own, temperature, max_new_tokens, slots, refill, longest)
            while waiting or batch.busy:
                if deadline is not None and time.monotonic() > deadline:
                    return
                while waiting and batch.free >= min(batch.refill, len(waiting)):
                    batch.add(_take(waiting, batch.refill))
                if done := batch.advance():
                    yield done

    if devices == 1:
        yield from on(None)
    else:
        yield from merge([functools.partial(on, device) for device in jax.local_devices()[:devices]])


def _take(waiting: collections.deque, most: int) -> list[Question]:
    """The next questions, fewer where another thread was faster."""
    taken = []
    with contextlib.suppress(IndexError):
        while len(taken) < most:
            taken.append(waiting.popleft())
    return taken


def merge(sources: Sequence[Callable[[], Iterator[Any]]]) -> Iterator[Any]:
    """The items of several iterators, each made and run in a thread of its own, as they come.

    The first error of any of them is raised here; closing this generator stops them all at their next item.
    """
    items: queue.SimpleQueue = queue.SimpleQueue()
    stop = threading.Event()

    def work(source):
        try:
            for item in source():
                items.put((item, None))
                if stop.is_set():
                    return
        except BaseException as error:  # whatever it is, the consumer must not wait for ever
            items.put((None, error))
        finally:
            items.put((None, None))

    threads = [threading.Thread(target=work, args=(source,), daemon=True) for source in sources]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            item, error = items.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class _Batch:
    """B slots on the device, and which question each of them is at."""

    def __init__(self, config, params, temperature, max_new_tokens, slots, refill, longest):
        self.config, self.slots, self.refill = config, slots, min(refill, slots)
        self.limit, self.temperature = max_new_tokens, temperature
        self.params = {"target": params, "drafter": None}
        passes = -(-longest // _MAX_CHUNK)
        chunk = -(-longest // (passes * 16)) * 16
        self.prompt_rows = chunk * passes
        self.loop = DecodeLoop(target=Decoder(config), proposer=NoDraft(), sample=temperature > 0, chunk=chunk)
        rows = max(longest + max_new_tokens + self.loop.proposer.max_path, self.prompt_rows)
        self.cache_rows, self.output_rows = -(-rows // ROW_TILE) * ROW_TILE, max_new_tokens + 1
        self.owner: list[Question | None] = [None] * slots
        self.request = self._request([])
        self.state = self._empty(slots)
        self.state = self.state.replace(done=jnp.ones_like(self.state.done))

    @property
    def free(self) -> int:
        return self.owner.count(None)

    @property
    def busy(self) -> bool:
        return any(q is not None for q in self.owner)

    def add(self, questions: list[Question]) -> None:
        """Prefills up to R questions in a batch of their own and moves them into free slots."""
        if not questions:
            return
        prompt = np.zeros((self.refill, self.prompt_rows), np.int32)
        for i, q in enumerate(questions):
            prompt[i, : len(q.prompt)] = q.prompt
        lengths = np.array([len(q.prompt) for q in questions] + [0] * (self.refill - len(questions)), np.int32)
        request = self._request(questions, self.refill)
        prompt, lengths = jax.device_put((prompt, lengths))
        state = device.start(self.loop, self.params, request, prompt, lengths, self._empty(self.refill))
        vacant = [i for i, q in enumerate(self.owner) if q is None][: len(questions)]
        where = np.array(vacant + [self.slots] * (self.refill - len(vacant)), np.int32)  # B is past the end: dropped
        self.state, self.request = _insert(self.state, self.request, state, request, jnp.asarray(where))
        for slot, q in zip(vacant, questions, strict=True):
            self.owner[slot] = q

    def advance(self) -> list[Answer]:
        """A few tokens in every slot; answers that are complete leave theirs."""
        self.state = device.advance(self.loop, self.params, self.request, self.state, jnp.int32(_ROUNDS_PER_LOOK))
        done = np.asarray(self.state.done)
        finished = [i for i, q in enumerate(self.owner) if q is not None and done[i]]
        if not finished:
            return []
        tokens, count = jax.device_get((self.state.tokens, self.state.num_tokens))
        answers = []
        for i in finished:
            q, self.owner[i] = self.owner[i], None
            answers.append(Answer(q.request, q.prompt, tokens[i, : count[i]].tolist()))
        return answers

    def _empty(self, slots: int) -> DecodeState:
        return device.empty_state(self.loop, slots, self.cache_rows, self.output_rows)

    def _request(self, questions: list[Question], slots: int | None = None) -> Request:
        slots = slots or self.slots
        missing = slots - len(questions)
        limits = [min(self.limit, self.config.max_position - len(q.prompt)) for q in questions]
        return jax.device_put(
            Request(
                limit=np.array(limits + [0] * missing, np.int32),
                seeds=np.array([q.seed for q in questions] + [0] * missing, np.uint32),
                stop_tokens=np.array(self.config.stop_token_ids or (-1,), np.int32),
                temperature=np.float32(self.temperature),
            )
        )


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _insert(state: DecodeState, request: Request, new: DecodeState, new_request: Request, where: jax.Array):
    """Moves the slots of `new` to the slots `where` [R] of `state`; an entry past the end is dropped."""
    put = lambda old, fresh: old.at[where].set(fresh, mode="drop")  # noqa: E731
    limit, seeds = put(request.limit, new_request.limit), put(request.seeds, new_request.seeds)
    cache = put_slots(state.target_cache, new.target_cache, where)
    state = jax.tree.map(put, state.replace(target_cache=None), new.replace(target_cache=None))
    return state.replace(target_cache=cache), request.replace(limit=limit, seeds=seeds)


def request_seed(seed: int, request: int) -> int:
    """Seed of one request's draws: 32 bits that do not repeat a neighbour's noise."""
    return int(np.random.SeedSequence([seed, request]).generate_state(1)[0])
