"""Plots of an evaluation, all sets together: accepted length and speed over width, histogram, acceptance by depth."""

from collections.abc import Sequence
from pathlib import Path

from ddtree_jax.config import AUTO
from ddtree_jax.evaluation.summary import overall

_LINES = {"ddtree": "-", "eagle2": "-", "static_tree": "--", "lookup_tree": "-."}
_CHAINS = {"dflash": ":", "best_path": ":", "lookup": (0, (1, 4))}


def plot_all(rows: Sequence[dict], folder: str | Path) -> list[Path]:
    """Writes the plots as PNG files into `folder`. Raises ImportError without matplotlib (the extra `demo`)."""
    import matplotlib

    matplotlib.use("Agg")
    shown = overall(rows)
    folder = Path(folder)
    paths = [_histogram(shown, folder / "histogram.png"), _by_depth(shown, folder / "acceptance_by_depth.png")]
    if any(_has_width(r) for r in rows):  # trees, so widths to plot over
        paths += [
            _over_width(rows, folder / "accepted_length.png", "accepted", "mean accepted length"),
            _over_width(rows, folder / "tokens_per_second.png", "tokens_per_second", "tokens/s"),
        ]
    return paths


def _has_width(row: dict) -> bool:
    """Whether a row belongs at one place of an axis of widths."""
    return isinstance(row["num_nodes"], int)


def _figure():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _over_width(rows, path, key, label):
    figure, axes = _figure()
    for index, name in enumerate(dict.fromkeys(r["set"] for r in rows)):
        style = dict(color=f"C{index}", linewidth=2.5 if name == "all" else 1)
        here = [r for r in rows if r["set"] == name and r[key] is not None]
        for method in dict.fromkeys(r["method"] for r in here if _has_width(r)):
            trees = sorted((r["num_nodes"], r[key]) for r in here if r["method"] == method and _has_width(r))
            axes.plot(*zip(*trees), marker="o", linestyle=_LINES[method], label=f"{name}, {method}", **style)
        for row in here:
            if row["num_nodes"] == AUTO:
                axes.axhline(row[key], linestyle="-.", **style)
            elif row["method"] in _CHAINS:
                axes.axhline(row[key], linestyle=_CHAINS[row["method"]], **style)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tree width N, root included (dotted: chains; widely: look-up; dot-dashed: auto)")
    axes.set_ylabel(label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    return path


def _histogram(rows, path):
    figure, axes = _figure()
    drafted = [r for r in rows if r["variant"] != "autoregressive"]
    width = 0.8 / max(1, len(drafted))
    for i, row in enumerate(drafted):
        counts = {int(k): v for k, v in row["histogram"].items()}
        total = sum(counts.values()) or 1
        axes.bar(
            [n + i * width for n in counts], [100 * v / total for v in counts.values()], width, label=row["variant"]
        )
    axes.set_xlabel("tokens committed by a round")
    axes.set_ylabel("rounds, %")
    if drafted:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    return path


def _by_depth(rows, path):
    figure, axes = _figure()
    drafted = [r for r in rows if r["variant"] != "autoregressive"]
    for row in drafted:
        share = row["acceptance_by_depth"]
        axes.plot(range(1, len(share) + 1), share, marker=".", label=row["variant"])
    axes.set_xlabel("depth")
    axes.set_ylabel("accepted, given that the depth before was")
    axes.set_ylim(0, 1)
    if drafted:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    return path
