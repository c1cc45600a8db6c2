"""What a comparison runs: methods at widths, static trees by shape."""

import dataclasses
import hashlib
from collections.abc import Sequence

from ddtree_jax.config import AUTO, METHODS, DecodeConfig
from ddtree_jax.decode.plan import static_choices
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.tree import PRESETS, Choices


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method, with the width of its tree where it has one.

    Attributes:
      method: a key of METHODS.
      num_nodes: N, root included, or "auto"; None for methods without a width.
      tree_choices: of a static tree.
      widths: what "auto" chooses among.
    """

    method: str
    num_nodes: int | str | None = None
    tree_choices: Choices | None = None
    widths: tuple[int, ...] = DecodeConfig.widths

    @property
    def name(self) -> str:
        """Such as "dflash", "ddtree-64", "static_tree-26-eagle-1", "ddtree-auto"; no two trees share one."""
        name = self.method if self.num_nodes is None else f"{self.method}-{self.num_nodes}"
        if self.num_nodes == AUTO and self.widths != DecodeConfig.widths:
            name += "-of-" + "-".join(map(str, self.widths))
        return name if self.tree_choices is None else f"{name}-{_tree_name(self.tree_choices)}"

    def config(self, base: DecodeConfig) -> DecodeConfig:
        return dataclasses.replace(
            base,
            method=self.method,
            num_nodes=self.num_nodes if METHODS[self.method].has_width else base.num_nodes,
            tree_choices=self.tree_choices,
            widths=self.widths,
        )


def variants(
    methods: Sequence[str],
    widths: Sequence[int | str],
    trees: Sequence[str | Choices | None],
    base: DecodeConfig,
    target: Target,
    drafter: Drafter | None,
) -> list[Variant]:
    """Each method once, methods with a width once a width, static trees once a tree; "auto" where it can be had.

    Raises ValueError on an unknown method, on a tree that does not fit, on one without a drafter, and where "auto" is
    all that a method could have and it cannot.
    """
    found = []
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"method {name!r} is unknown; known: {', '.join(METHODS)}")
        if name == "static_tree":
            if drafter is None:
                raise ValueError(f"method {name!r} needs a drafter, and none was given")
            for tree in trees:
                config = dataclasses.replace(base, method=name, tree_choices=tree)
                choices = static_choices(config, drafter.config)
                found.append(Variant(name, 1 + len(choices), choices))
        elif METHODS[name].has_width:
            # Of several widths a method that cannot choose its own takes the others.
            own = [n for n in widths if n != AUTO or METHODS[name].best_first]
            if not own:
                raise ValueError(
                    f"method {name!r} cannot choose its width ({AUTO}): name a width as well, or leave it out"
                )
            found += [Variant(name, n, widths=base.widths if n == AUTO else DecodeConfig.widths) for n in own]
        else:
            found.append(Variant(name))
    return list(dict.fromkeys(found))


def _tree_name(choices: Choices) -> str:
    published = (name for name, tree in PRESETS.items() if tree == choices)
    return next(published, hashlib.sha256(repr(choices).encode()).hexdigest()[:6])
