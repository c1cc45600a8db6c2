"""Checkpoints of a training run: parameters, optimiser and step, written whole or not at all.

```
FOLDER/step-00000500/state/    one Orbax checkpoint
FOLDER/step-00000500/run.json  fingerprint of the target, settings, step
```
A checkpoint is written beside its place and renamed at the end, so a folder with the final name is complete.
"""

import errno
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from ddtree_jax.checkpoint import flatten
from ddtree_jax.train.config import FREE, TrainConfig
from ddtree_jax.train.step import TrainState

_NAME = re.compile(r"step-(\d{8})")


class TrainingError(ValueError):
    """A run that cannot start or go on; one line that says what and where."""


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Attributes:
      folder: see the module.
      keep: how many of the newest stay.
      identity: what must agree before a run goes on: {"target": fingerprint, "config": settings}.
    """

    def __init__(self, folder: str | Path, config: TrainConfig, fingerprint: str, data: str):
        self.folder, self.keep = Path(os.path.abspath(folder)), config.keep_checkpoints
        self.identity = {"target": fingerprint, "data": data, "config": config.to_json()}

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(p.name) for p in self.folder.iterdir() if (p / "run.json").is_file())
        return sorted(int(m[1]) for m in found if m)

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint and removes the oldest beyond `keep`.

        Raises TrainingError where it cannot be written, a full disk included; earlier checkpoints are then untouched.
        """
        step = int(state.step)
        final = self.folder / f"step-{step:08d}"
        if final.is_dir():
            return
        temporary = self.folder / f".writing-{secrets.token_hex(4)}"
        try:
            temporary.mkdir(parents=True)
            write_state(temporary / "state", state)
            text = json.dumps(self.identity | {"step": step}, indent=2)
            with open(temporary / "run.json", "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, final)
        except Exception as error:
            # Storage libraries below Orbax report a full disk as ValueError or RuntimeError, too.
            if not isinstance(error, OSError) and "space" not in str(error).lower():
                raise
            full = getattr(error, "errno", None) == errno.ENOSPC or "space" in str(error).lower()
            reason = "the disk is full" if full else f"cannot be written: {getattr(error, 'strerror', None) or error}"
            last = self.steps()
            rest = f"is {self.folder / f'step-{last[-1]:08d}'}" if last else "does not exist yet"
            raise TrainingError(f"{final}: {reason}; the last good checkpoint {rest}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:08d}", ignore_errors=True)

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest state, or None where there is none.

        Args:
          like: a state of the shapes that are expected.

        Raises:
          TrainingError: it belongs to another target, other answers or other settings, or is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        folder = self.folder / f"step-{steps[-1]:08d}"
        try:
            found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            theirs, ours = found["config"], self.identity["config"]
        except (OSError, ValueError, KeyError) as error:
            raise TrainingError(f"{folder}/run.json: damaged: {error}") from None
        if found.get("target") != self.identity["target"]:
            raise TrainingError(f"{folder}: belongs to another target (fingerprint {found.get('target')}, "
                                f"this one has {self.identity['target']})")  # fmt: skip
        for key in sorted((ours.keys() | theirs.keys()) - set(FREE)):
            # What went through JSON has lists for tuples.
            mine = json.loads(json.dumps(ours.get(key)))
            if mine != theirs.get(key):
                raise TrainingError(f"{folder}: was trained with {key} = {theirs.get(key)!r}, the config says {mine!r}")
        if found.get("data") != self.identity["data"]:
            raise TrainingError(f"{folder}: was trained on other answers (digest {found.get('data')}, "
                                f"these have {self.identity['data']})")  # fmt: skip
        return read_state(folder / "state", like)


def write_state(path: Path, state: TrainState) -> None:
    """Writes a state as an Orbax checkpoint at `path`, a folder to create."""
    ocp.save(path, _tree(state))


def read_state(path: Path, like: TrainState) -> TrainState:
    """Reads what `write_state` wrote, onto the devices of `like`. Raises TrainingError where it is damaged."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _tree(like))
    try:
        wanted, found = set(flatten(abstract)), set(flatten(ocp.metadata(path).metadata))
        tree = ocp.load(path, abstract) if wanted == found else None
    except Exception as error:  # Orbax lets many types through for a damaged file
        raise TrainingError(f"{path}: truncated or damaged: {str(error).strip().splitlines()[0][:200]}") from None
    if tree is None:
        odd = min(wanted ^ found)
        expected = "expected, and not found" if odd in wanted else "found, and not expected"
        raise TrainingError(f"{path}: {odd}: {expected}: of another drafter or another version of this package?")
    structure = jax.tree.structure(like.optimizer)
    leaves = [tree["optimizer"][f"{i:04d}"] for i in range(structure.num_leaves)]
    # Copies: arrays from the loader may share memory with it, and a state is donated.
    state = TrainState(tree["params"], jax.tree.unflatten(structure, leaves), tree["step"], tree["total_steps"])
    return jax.tree.map(jnp.copy, state)


def _tree(state: TrainState) -> dict[str, Any]:
    # optax states are nested named tuples; a flat dict does not depend on how a version of optax nests them.
    leaves = {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state.optimizer))}
    return {"params": state.params, "optimizer": leaves, "step": state.step, "total_steps": state.total_steps}
