"""From the drafter's marginals to an accepted path, without the models: top-k, tree, acceptance.

  python -m benchmarks.tree_build [--vocab 151936] [--depth 15] [--nodes 16,32,64,128,256]
  python -m benchmarks.tree_build --nodes 64,256 --blocks "" 32 16,16 auto --select top_k counting counting,repeated

Times are microseconds of one call inside a device loop; the floor of the top-k is one read of the marginals. Runs
anywhere; figures are worth something on a GPU.
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp

from benchmarks import _timing
from ddtree_jax.tree import accept, build_from_top, build_tree, top_log_probs, top_tokens
from ddtree_jax.tree.select import SELECTIONS, Search, gpu_search


def marginals(depth: int, vocab: int) -> jax.Array:
    """[1, L, V] float32 log probabilities that flatten with depth, as a drafter's do."""
    logits = jax.random.normal(jax.random.key(0), (1, depth, vocab), jnp.float32)
    sharpness = jnp.linspace(8.0, 3.0, depth)[None, :, None]
    return jax.nn.log_softmax(logits * sharpness, axis=-1)


def measure(call, *operands, iterations: int) -> float:
    """Microseconds of call(shift, *operands); the [] float32 shift ties one iteration to the one before."""

    def step(carry, *operands):
        leaves = jax.tree.leaves(call(carry * 0.0, *operands))
        return sum(jnp.sum(x.astype(jnp.float32)) for x in leaves) * 1e-30

    loop = _timing.compile_loop(step, jnp.float32(0), [operands], iterations)
    return _timing.time_loop_us(loop, jnp.float32(0), [operands], iterations)


def searches(args: argparse.Namespace, k: int) -> dict[str, Search | None]:
    """The ways to find k tokens, by name: the default, and each of `--blocks` with each of `--select`."""
    found: dict[str, Search | None] = {"default": None}
    for text in args.blocks:
        auto = gpu_search(args.vocab, k).blocks
        blocks = auto if text == "auto" else tuple(int(n) for n in text.split(",") if n)
        for select in args.select:
            found[f"{','.join(map(str, blocks)) or 'row'} {select}"] = Search(blocks, tuple(select.split(",")))
    return found


def rows(args: argparse.Namespace):
    """One row a width."""
    log_probs = marginals(args.depth, args.vocab)
    path_rows = args.depth + 1
    for nodes in (int(n) for n in args.nodes.split(",")):
        k = min(nodes - 1, args.vocab)
        top = jax.jit(top_tokens, static_argnums=1)(log_probs, k)
        tree = jax.jit(build_tree, static_argnums=1)(log_probs, nodes)
        draws = jnp.zeros((1, nodes), jnp.int32)
        run = lambda call, *operands: measure(call, *operands, iterations=args.iterations)  # noqa: E731

        yield {
            "nodes": nodes,
            **{
                f"top_tokens_us {name}": run(lambda shift, p: top_tokens(p + shift, k, search=s), log_probs)  # noqa: B023
                for name, s in searches(args, k).items()
            },
            "top_log_probs_us": run(lambda shift, p: top_log_probs(p + shift, k), log_probs),  # noqa: B023
            "build_from_top_us": run(lambda shift, p, t: build_from_top(p + shift, t, nodes), *top),  # noqa: B023
            "build_tree_us": run(lambda shift, p: build_tree(p + shift, nodes), log_probs),  # noqa: B023
            "accept_us": run(
                lambda shift, tree, d: accept(tree, d + shift.astype(jnp.int32), max_path=path_rows), tree, draws
            ),
            "top_tokens_floor_us": _timing.floor_us(4 * args.depth * args.vocab, 0),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--nodes", default="16,32,64,128,256")
    parser.add_argument(
        "--blocks", nargs="*", default=[], help='widths of blocks, several to compare: "" the whole row, 32,32, auto'
    )
    parser.add_argument(
        "--select",
        nargs="+",
        default=["counting"],
        help=f"how lists are searched, several: one of {', '.join(SELECTIONS)}; or one a level, values first",
    )
    parser.add_argument("--iterations", type=int, default=50)
    args = parser.parse_args()
    if unknown := {name for names in args.select for name in names.split(",")} - set(SELECTIONS):
        parser.error(f"--select must be of {', '.join(SELECTIONS)}, got {', '.join(sorted(unknown))}")
    print(f"{jax.devices()[0].device_kind}, L = {args.depth}, V = {args.vocab}, microseconds")
    for row in rows(args):
        print(json.dumps({k: round(v, 1) for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
