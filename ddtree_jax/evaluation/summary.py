"""Statistics of an evaluation: one row for each prompt set and variant, and for all sets together."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

LOOP_GRAM = 16


def ends_in_loop(tokens: Sequence[int], gram: int = LOOP_GRAM) -> bool:
    """Whether the last `gram` tokens occurred before: the text repeats itself at its end."""
    if len(tokens) <= gram:
        return False
    last = tuple(tokens[-gram:])
    return any(tuple(tokens[i : i + gram]) == last for i in range(len(tokens) - gram))


def histogram(lengths: Sequence[int]) -> dict[int, int]:
    """Rounds by accepted length."""
    return dict(sorted(Counter(lengths).items()))


def acceptance_by_depth(lengths: Sequence[int]) -> list[float]:
    """Entry d - 1: share of rounds that accepted a drafted token at depth d, given that they accepted d - 1 of them."""
    out = []
    for depth in range(1, max(lengths, default=1)):
        reached = sum(n >= depth for n in lengths)
        out.append(sum(n > depth for n in lengths) / reached)
    return out


def summarise(records: Sequence[dict], baseline: str) -> list[dict]:
    """Rows (set, variant, ...) in order of appearance; the set "all" averages the sets, each with the same weight.

    `accepted` is the mean over prompts of each prompt's mean accepted length (the tau of the literature),
    `accepted_pooled` the mean over all rounds. `speedup` is over the variant `baseline`.
    """
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for record in records:
        groups[record["set"], record["variant"]].append(record)
    texts = {(r["set"], r["turn"], r["id"]): r["tokens"] for r in records if r["variant"] == baseline}
    rows = [_row(name, variant, group, texts) for (name, variant), group in groups.items()]
    speeds = {(r["set"], r["variant"]): r["tokens_per_second"] for r in rows}
    for row in rows:
        base = speeds.get((row["set"], baseline))
        row["speedup"] = row["tokens_per_second"] / base if base else None
    return rows + _averages(rows)


def _row(name: str, variant: str, group: Sequence[dict], texts: dict) -> dict:
    lengths = [n for r in group for n in r["accepted_lengths"]]
    means = [statistics.fmean(r["accepted_lengths"]) for r in group if r["accepted_lengths"]]
    tokens = sum(len(r["tokens"]) for r in group)
    compared = [r for r in group if (r["set"], r["turn"], r["id"]) in texts]
    return {
        "set": name,
        "variant": variant,
        "method": group[0]["method"],
        "num_nodes": group[0]["num_nodes"],
        "prompts": len(group),
        "new_tokens": tokens,
        "rounds": len(lengths),
        "accepted": statistics.fmean(means) if means else None,
        "accepted_pooled": statistics.fmean(lengths) if lengths else None,
        "tokens_per_second": tokens / sum(r["seconds"] for r in group),
        "looping": sum(ends_in_loop(r["tokens"]) for r in group) / len(group),
        "same_text": sum(texts[r["set"], r["turn"], r["id"]] == r["tokens"] for r in compared),
        "compared": len(compared),
        "histogram": histogram(lengths),
        "acceptance_by_depth": acceptance_by_depth(lengths),
    }


def _averages(rows: Sequence[dict]) -> list[dict]:
    groups: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        groups[row["variant"]].append(row)
    if len({r["set"] for r in rows}) < 2:
        return []
    out = []
    for variant, group in groups.items():
        counts: Counter = Counter()
        for row in group:
            counts.update(row["histogram"])
        lengths = [n for n, count in counts.items() for _ in range(count)]
        mean = {
            key: statistics.fmean(values) if (values := [r[key] for r in group if r[key] is not None]) else None
            for key in ("accepted", "tokens_per_second", "looping", "speedup")
        }
        total = {
            key: sum(r[key] for r in group) for key in ("prompts", "new_tokens", "rounds", "same_text", "compared")
        }
        out.append(
            {"set": "all", "variant": variant, "method": group[0]["method"], "num_nodes": group[0]["num_nodes"]}
            | total
            | mean
            | {
                "accepted_pooled": statistics.fmean(lengths) if lengths else None,
                "histogram": histogram(lengths),
                "acceptance_by_depth": acceptance_by_depth(lengths),
            }
        )
    return out


def overall(rows: Sequence[dict]) -> list[dict]:
    """The rows that stand for the whole evaluation: the set "all", or the only set there is."""
    sets = {r["set"] for r in rows}
    return [r for r in rows if r["set"] == "all" or len(sets) == 1]


def best_widths(rows: Sequence[dict]) -> list[dict]:
    """The rows of each method's fastest variant overall. Chosen on the prompts shown, it flatters a little."""
    best: dict[str, dict] = {}
    for row in overall(rows):
        if row["method"] not in best or row["tokens_per_second"] > best[row["method"]]["tokens_per_second"]:
            best[row["method"]] = row
    return [r for r in rows if r["variant"] == best[r["method"]]["variant"]]


COLUMNS = ("set", "variant", "prompts", "accepted", "pooled", "tokens/s", "speed-up", "looping", "same text")


def cells(row: dict) -> list[str]:
    """A row as text, in the order of COLUMNS."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        row["set"], row["variant"], str(row["prompts"]), number(row["accepted"], ".2f"),
        number(row["accepted_pooled"], ".2f"), number(row["tokens_per_second"], ".0f"),
        number(row["speedup"], ".2f"), number(row["looping"], ".0%"), f"{row['same_text']}/{row['compared']}",
    ]  # fmt: skip


def markdown(rows: Sequence[dict]) -> str:
    """The table of a README."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * 2 + "---:|" * (len(COLUMNS) - 2)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"
