"""Pictures of results, as docs/plots/NAME.png. Knows the keys of the results it draws; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

FOLDER = Path(__file__).parent.parent / "docs" / "plots"
OURS, OTHER = "#d9480f", "#868e96"
COLORS = (OURS, "#1971c2", "#2f9e44", "#9c36b5")


def draw(name: str, result: dict[str, Any]) -> Path:
    """Draw a result to its file."""
    panels = DRAWINGS[name]
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(7 + 3 * (len(panels) - 1), 4), layout="constrained", squeeze=False
    )
    for axes, panel in zip(grid[0], panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        panel(axes, result)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _host(axes: Axes, result: dict[str, Any]) -> None:
    """Pairs of bars: the pool's and DDP's parts of the ceiling."""
    found: list[tuple[str, Any, Any]] = []
    for size, suffix in (("1.13 M", ""), ("10 M", "_10m"), ("50 M", "_50m")):
        ratios, ddp = result[f"ratio{suffix}"], result[f"ddp{suffix}"]
        found += [(f"{size}\n{nodes} nodes", ratios[nodes], ddp[nodes]) for nodes in ratios]
    if "ratio_16" in result:
        found.append(("1.13 M\nper 16", result["ratio_16"], result["ddp_16"]))
    names, ours, theirs = zip(*found, strict=True)
    for shift, values, label, color in ((-0.2, ours, "wide", OURS), (0.2, theirs, "DDP", OTHER)):
        bars = axes.bar([i + shift for i in range(len(names))], values, width=0.38, label=label, color=color)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set(ylabel="batches/s ÷ processes that never talk", title="One machine")
    axes.legend(frameon=False)


def _stages(axes: Axes, result: dict[str, Any]) -> None:
    rates = result["batches_per_s"]
    colors = [OURS if name.startswith("pool") else OTHER for name in rates]
    bars = axes.barh([name.replace("_", ", an update per ") for name in rates], list(rates.values()), color=colors)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.set(xlabel="batches/s, ten nodes", title="The ancestor's workload")


def _wire(axes: Axes, result: dict[str, Any]) -> None:
    sizes = [key.removeprefix("ratio_") for key in result if key.startswith("ratio_")]
    nbytes = [int(size[:-2]) << (10 if size.endswith("kb") else 20) for size in sizes]
    for side, label, color in (("bare", "bare sockets", OTHER), ("ours", "wide", OURS)):
        axes.plot(nbytes, [result[f"{side}_mb_per_s_{size}"] for size in sizes], "o-", label=label, color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(nbytes, [f"{size[:-2]} {size[-2:].upper()}" for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="payload", ylabel="MB/s", title="A message with a payload and its answer, over loopback")
    axes.legend(frameon=False)


def _sockets(axes: Axes, result: dict[str, Any]) -> None:
    names = [name for name in result if name.startswith("buffer_")]
    sizes_kb = [int(name[len("buffer_") : -len("kb")]) for name in names]
    axes.plot(sizes_kb, [result[name]["speed"] for name in names], "o-", color=OURS, label="buffer of this size")
    axes.axhline(1.0, color=OTHER, linestyle="--", label="the kernel's autotuning")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes_kb, [f"{size} KB" if size < 1024 else f"{size >> 10} MB" for size in sizes_kb])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max(result[name]["speed"] for name in names))
    axes.set(xlabel="SO_SNDBUF and SO_RCVBUF", ylabel="throughput ÷ autotuning's", title="16 MB payloads over loopback")
    axes.legend(frameon=False, loc="lower right")


def _logging(axes: Axes, result: dict[str, Any]) -> None:
    tiers = {"silent": 1.0, "normal": result["normal"], "verbose": result["verbose"]}
    bars = axes.bar(list(tiers), list(tiers.values()), color=[OTHER, OURS, OURS], width=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(y=0.12)
    axes.set(ylabel="batches/s ÷ silent's", title="What a log costs: 4 nodes, a message per batch")


def _codecs(axes: Axes, result: dict[str, Any]) -> None:
    mbits, times = result["mbits"], result["seconds"]["gradient"]
    for name in [name for name in times[0] if name != "chosen"]:
        axes.plot(mbits, [1000 * row[name] for row in times], label=name, linewidth=1.2)
    chosen = [1000 * row["chosen"] for row in times]
    axes.plot(mbits, chosen, "o", color="black", markerfacecolor="none", markersize=9, label="chosen")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g} Gbit/s" if x >= 1000 else f"{x:g} Mbit/s")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel="link", ylabel="ms", title="A gradient of 4.5 MB: encoded, sent, decoded")
    axes.legend(frameon=False)


def _slowlink(axes: Axes, result: dict[str, Any]) -> None:
    rates = result["steps_per_s"]
    bars = axes.bar(list(rates), list(rates.values()), color=[OTHER, OURS, OURS], width=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(y=0.12)
    axes.set(ylabel="steps/s", xlabel="--compress", title=f"1.13 M parameters over {result['mbit']:g} Mbit/s")


def _smooth(values: list[float], over: int) -> list[float]:
    return [sum(values[max(0, i - over + 1) : i + 1]) / min(i + 1, over) for i in range(len(values))]


def _strategies(axes: Axes, result: dict[str, Any], column: int, label: str) -> None:
    for (name, curve), color in zip(result["curves"]["chargpt"].items(), COLORS, strict=False):
        axes.plot([row[column] for row in curve], _smooth([row[2] for row in curve], 25), label=name, color=color)
    axes.set(xlabel=label, ylabel="training loss (mean of 25 steps)", title="Character GPT, four nodes")
    axes.legend(frameon=False)


def _network(axes: Axes, result: dict[str, Any]) -> None:
    for (name, curve), color in zip(result["curves"].items(), COLORS, strict=False):
        label = "wide --strategy auto" if name == "wide" else f"DDP, {name}"
        axes.plot([at for at, _ in curve], [loss for _, loss in curve], label=label, color=color)
    axes.axhline(result["target"], color=OTHER, linestyle=":", label="target")
    axes.set_xscale("log")
    axes.set_xticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_ylim(0, 1.5)
    axes.set(xlabel="seconds of training", ylabel="held-out loss", title="1.13 M parameters, four hosts at 100 Mbit/s")
    axes.legend(frameon=False)


DRAWINGS: dict[str, tuple[Callable[[Axes, dict[str, Any]], None], ...]] = {
    "host": (_host,),
    "stages": (_stages,),
    "wire": (_wire,),
    "sockets": (_sockets,),
    "logging": (_logging,),
    "codecs": (_codecs,),
    "slowlink": (_slowlink,),
    "strategies": (partial(_strategies, column=0, label="samples"), partial(_strategies, column=1, label="seconds")),
    "network": (_network,),
}
