"""The training loop: steps, log, evaluation, checkpoints, resuming, the clock."""

import dataclasses
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import DrafterConfig
from ddtree_jax.loading import Target
from ddtree_jax.train.answers import fingerprint
from ddtree_jax.train.checkpoints import Checkpoints, TrainingError
from ddtree_jax.train.config import TrainConfig
from ddtree_jax.train.data import Rows, batch_index, steps_per_epoch
from ddtree_jax.train.evaluate import Evaluation, evaluate, score_rows
from ddtree_jax.train.flops import PEAK_FLOPS, step_flops
from ddtree_jax.train.loss import Report, report
from ddtree_jax.train.parallel import one_copy, replicate
from ddtree_jax.train.progress import ProgressLine
from ddtree_jax.train.step import Models, TrainState, init_state, to_device, train_step

# Steps after which speed is first measured: the first ones compile and fill the queue.
_WARM_STEPS = 5
_TIMED_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run leaves.

    Attributes:
      config: of the drafter.
      params: of the drafter, in `config.dtype`.
      steps: optimiser steps in all.
      report: means since the last line of the log.
      evaluation: on held-out answers at the end; None without any.
    """

    config: DrafterConfig
    params: Any
    steps: int
    report: Report | None
    evaluation: Evaluation | None


def train(
    target: Target, rows: Rows, config: TrainConfig, folder: str | Path, *, eval_rows: dict[str, Rows] | None = None,
    resume: bool = False, quiet: bool = False,
) -> Trained:  # fmt: skip
    """Trains a drafter on packed answers.

    Args:
      target: frozen; its parameters stay in their own dtype.
      rows: training rows, see `data.pack`.
      folder: gets `checkpoints/` and `log.jsonl`.
      eval_rows: held-out rows by name; the first set is evaluated every `eval_every` steps, all at the end.
      resume: go on from the newest checkpoint, if any. On a CPU the result is that of an unbroken run, bit for bit.

    Raises:
      ValueError: settings that do not fit the target.
      TrainingError: a run is there already and `resume` is off, a checkpoint of another run, a disk that is full.
    """
    run = _Run(target, rows, config, Path(folder), eval_rows or {}, resume, quiet)
    return run.loop()


def check_fresh(folder: str | Path, resume: bool) -> None:
    """Raises TrainingError if `folder` holds a run and `resume` is off."""
    if not resume and any((Path(folder) / "checkpoints").glob("step-*/run.json")):
        raise TrainingError(f"{folder}: holds a run already; pass resume (--resume), or use another folder")


class _Run:
    def __init__(self, target, rows, config, folder, eval_rows, resume, quiet):
        self.began = time.monotonic()
        self.target, self.rows, self.config, self.folder = target, rows, config, folder
        self.eval_rows, self.quiet = eval_rows, quiet
        self.models = Models.of(config, target.config)
        digest = hashlib.sha256(rows.tokens.tobytes() + rows.labels.tobytes()).hexdigest()[:16]
        theirs = fingerprint(target.config, target.params)
        self.checkpoints = Checkpoints(folder / "checkpoints", config, theirs, digest)
        check_fresh(folder, resume)
        folder.mkdir(parents=True, exist_ok=True)
        planned = config.steps or config.epochs * steps_per_epoch(len(rows), config.batch_size)
        self.target_params = replicate(self.models.mesh, target.params)
        self.state: TrainState = replicate(self.models.mesh, init_state(self.models, target.params, planned))
        if (found := self.checkpoints.restore(self.state)) is not None:
            self.state = (
                found
                if config.max_minutes
                else found.replace(total_steps=replicate(self.models.mesh, jnp.int32(planned)))
            )
        self.step = self.first = int(self.state.step)
        self.total, self.planned = int(self.state.total_steps), planned
        self.pending: list[dict] = []  # sums on the device since the last log line
        self.evaluation_seconds = 0.0

    def loop(self) -> Trained:
        config, first = self.config, self.first
        last_report = None
        marked_step, marked_time = self.step, time.monotonic()
        if self.eval_rows and config.eval_every:
            # Compiles now, so that the first evaluation takes as long as the others: the schedule counts on it.
            rows = next(iter(self.eval_rows.values()))
            batch = to_device(rows.take(np.arange(config.batch_size)), self.models.mesh)
            jax.block_until_ready(score_rows(self.models, self.state.params, self.target_params, batch))
        with ProgressLine("training", self.total, quiet=self.quiet) as progress:
            while self.step < self.total:
                index = batch_index(len(self.rows), config.batch_size, config.seed, self.step)
                batch = to_device(self.rows.take(index), self.models.mesh)
                self.state, sums = train_step(self.models, self.state, self.target_params, batch)
                self.pending.append(sums)
                self.step += 1
                # The program runs ahead of the device; only these lines wait for it.
                done = self.step - first
                if done == _WARM_STEPS:
                    jax.block_until_ready(self.state.step)
                    marked_step, marked_time = self.step, time.monotonic()
                timed = done == _WARM_STEPS + _TIMED_STEPS
                if self.step % config.log_every == 0 or self.step == self.total or timed:
                    last_report, rate, norm = self._summarise()
                    seconds = (time.monotonic() - marked_time) / max(1, self.step - marked_step)
                    self._follow_clock(seconds)
                    self._log_step(progress, last_report, rate, norm, seconds)
                    marked_step, marked_time = self.step, time.monotonic()
                if config.eval_every and self.step % config.eval_every == 0 and self.step < self.total:
                    self._evaluate(progress, list(self.eval_rows)[:1])
                    marked_time += self.evaluation_seconds
                if config.checkpoint_every and self.step % config.checkpoint_every == 0 and self.step < self.total:
                    saving = time.monotonic()
                    self.checkpoints.save(self.state)
                    marked_time += time.monotonic() - saving
            self.checkpoints.save(self.state)
            evaluation = self._evaluate(progress, list(self.eval_rows))
        dtype = self.models.drafter.jax_dtype
        params = jax.tree.map(lambda x: x.astype(dtype), one_copy(self.models.mesh, self.state.params))
        return Trained(self.models.drafter, params, self.step, last_report, evaluation)

    def _summarise(self) -> tuple[Report, float, float]:
        sums, self.pending = jax.device_get(self.pending), []
        summary = report(sums)
        if not math.isfinite(summary.loss):
            last = self.checkpoints.steps()
            raise TrainingError(f"the loss is {summary.loss} at step {self.step}; "
                                f"checkpoints: {last or 'none'}; lower learning_rate")  # fmt: skip
        return summary, float(sums[-1]["learning_rate"]), float(np.mean([s["gradient_norm"] for s in sums]))

    def _follow_clock(self, seconds: float) -> None:
        """Fits the schedule to the time left, at the speed just measured."""
        if not self.config.max_minutes or self.step >= self.total or self.step - self.first <= _WARM_STEPS:
            return
        left = 60 * self.config.max_minutes - (time.monotonic() - self.began)
        evals = left / seconds / self.config.eval_every if self.config.eval_every and self.eval_rows else 0
        # Evaluations to come, the last of them over all sets, and a little for saving.
        overhead = (evals + len(self.eval_rows)) * self.evaluation_seconds + 3
        total = self.step + max(0, int((left - overhead) / seconds))
        self.total = min(total, self.planned)
        self.state = self.state.replace(total_steps=replicate(self.models.mesh, jnp.int32(self.total)))

    def _evaluate(self, progress: ProgressLine, names: list[str]) -> Evaluation | None:
        first = None
        for name in names:
            began = time.monotonic()
            result = evaluate(self.models, self.state.params, self.target_params, self.eval_rows[name])
            self.evaluation_seconds = time.monotonic() - began
            first = first or result
            progress.note(f"step {self.step}: {name}: accepted length {result.accepted:.3f} (pooled "
                          f"{result.accepted_pooled:.3f}), loss {result.loss:.3f}, {result.documents} texts, accuracy "
                          f"{_percent(result.accuracy)}")  # fmt: skip
            self._write({"kind": "evaluation", "set": name, "step": self.step, **dataclasses.asdict(result)})
        return first

    def _log_step(self, progress: ProgressLine, summary: Report, rate: float, norm: float, seconds: float) -> None:
        tokens = self.config.batch_size * self.config.sequence_length / seconds
        devices = 1 if self.models.mesh is None else self.models.mesh.size
        share = step_flops(self.models) / seconds / (PEAK_FLOPS * devices)
        text = (f"loss {summary.loss:.3f}, accepted {summary.accepted:.2f}, accuracy {_percent(summary.accuracy)}, "
                f"{tokens:.0f} tokens/s, {1e3 * seconds:.1f} ms, {100 * share:.1f} % of peak")  # fmt: skip
        progress.update(self.step, text, total=self.total)
        self._write({
            "kind": "train", "step": self.step, "total_steps": self.total, "loss": summary.loss,
            "accepted": summary.accepted, "accuracy": summary.accuracy, "learning_rate": rate, "gradient_norm": norm,
            "tokens_per_second": tokens, "seconds_per_step": seconds, "share_of_peak": share, "devices": devices,
            "seconds": time.monotonic() - self.began,
        })  # fmt: skip

    def _write(self, line: dict) -> None:
        try:
            with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            last = self.checkpoints.steps()
            file = self.folder / "log.jsonl"
            raise TrainingError(f"{file}: {error.strerror}; checkpoints at steps {last}") from error


def _percent(accuracy: tuple[float, ...]) -> str:
    """Accuracy of the first slots and of the last, in percent."""
    shown = [*accuracy[:4], accuracy[-1]] if len(accuracy) > 5 else accuracy
    return "/".join(f"{100 * a:.0f}" for a in shown)
