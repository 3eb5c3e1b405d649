"""A plan as a table for people. Reads what `wide plan --json` prints; never touches training."""

from __future__ import annotations

from typing import Any

from wide.dashboard.progress import rate
from wide.dashboard.tables import size


def table(plan: dict[str, Any]) -> str:
    """Nodes, what each strategy would give in each codec, and the pick with its reason."""
    lines = [f"an update is {size(plan['update_nbytes'])}; measured while all nodes computed:"]
    for node in plan["nodes"]:
        link = f"up {mbit(node['up_mbit'])}, down {mbit(node['down_mbit'])}, {node['delay_ms']:.2g} ms away"
        if node["is_here"]:
            link = "on the coordinator's machine"
        lines.append(f"  node {node['node']} {node['name']:<16} {node['batches_per_s']:8.1f} batches/s   {link}")
    codecs = list(dict.fromkeys(codec for f in plan["forecasts"].values() for codec in f["by_codec"]))
    marked = [codec if codec in plan["lossless"] else f"{codec}*" for codec in codecs]
    has_links = any(not node["is_here"] for node in plan["nodes"])
    head = "batches/s, if all links used" + "".join(f"{codec:>9}" for codec in marked) if has_links else "batches/s"
    lines.append(f"{head:<28}{'best':>9}   utilisation   result")
    for name, forecast in plan["forecasts"].items():
        rates = "".join(f"{_rate(forecast['by_codec'].get(codec)):>9}" for codec in codecs) if has_links else ""
        best = f"{_rate(forecast['batches_per_s']):>9} {forecast['utilisation']:13.0%}"
        result = "exact" if forecast["is_exact"] else "not exact"
        picked = "   ◄" if name == plan["strategy"] else ""
        lines.append(f"  {name:<26}{rates}{best}   {result:<9}{picked}")
    if has_links and any("*" in codec for codec in marked):
        lines.append("  * loses precision: with it, sync is not exact either")
    lines += [node["burden"] for node in plan["nodes"] if node["burden"]]
    lines += [f"in the way: {words}" for words in plan["why_slow"]]
    lines.append(f"--strategy {plan['strategy']}: {plan['reason']}")
    return "\n".join(lines)


def mbit(rate_mbit: float) -> str:
    return f"{rate_mbit / 1000:.3g} Gbit/s" if rate_mbit >= 1000 else f"{rate_mbit:.3g} Mbit/s"


def _rate(found: float | None) -> str:
    return "" if found is None else rate(found)
