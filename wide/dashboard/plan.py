"""A plan as a table for people. Reads what `wide plan --json` prints; never touches training."""

from __future__ import annotations

from typing import Any

NO_LINK_MBIT = 100_000  # it must be on this machine


def table(plan: dict[str, Any]) -> str:
    """Nodes, what each strategy would give in each codec, and the pick with its reason."""
    lines = [f"an update is {plan['update_nbytes'] / 1e6:.3g} MB; measured while all nodes computed:"]
    for node in plan["nodes"]:
        link = f"up {_mbit(node['up_mbit'])}, down {_mbit(node['down_mbit'])}, {node['delay_ms']:.2g} ms away"
        if min(node["up_mbit"], node["down_mbit"]) > NO_LINK_MBIT:
            link = "no network between"
        lines.append(f"  node {node['node']} {node['name']:<16} {node['batches_per_s']:8.1f} batches/s   {link}")
    codecs = list(dict.fromkeys(codec for f in plan["forecasts"].values() for codec in f["by_codec"]))
    lines.append(
        "batches/s, if all links used" + "".join(f"{codec:>9}" for codec in codecs) + "     best   utilisation"
    )
    for name, forecast in plan["forecasts"].items():
        rates = "".join(f"{_rate(forecast['by_codec'].get(codec)):>9}" for codec in codecs)
        best = f"{_rate(forecast['batches_per_s']):>9} {forecast['utilisation']:12.0%}"
        lines.append(f"  {name:<26}{rates}{best}{'   ◄' if name == plan['strategy'] else ''}")
    lines += [node["burden"] for node in plan["nodes"] if node["burden"]]
    lines.append(f"--strategy {plan['strategy']}: {plan['reason']}")
    return "\n".join(lines)


def _mbit(mbit: float) -> str:
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1f}"
