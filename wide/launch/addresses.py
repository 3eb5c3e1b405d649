"""Where others find this machine. Knows its network interfaces."""

from __future__ import annotations

import ipaddress
import socket

import psutil

MOST_ADDRESSES = 4
INSIDE = ("docker", "br-", "virbr", "veth", "cni", "flannel")  # networks of this machine's own containers


def addresses(host: str) -> list[str]:
    """Where others find this machine, if it listens on `host`: for 0.0.0.0 and ::, which mean all, each of its own."""
    if not ipaddress.ip_address(host).is_unspecified:
        return [host]
    families = (socket.AF_INET, socket.AF_INET6) if ":" in host else (socket.AF_INET,)
    found = []
    for name, interface in psutil.net_if_addrs().items():
        if (state := psutil.net_if_stats().get(name)) is None or not state.isup or name.startswith(INSIDE):
            continue
        for entry in [entry for entry in interface if entry.family in families]:
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not address.is_loopback and not address.is_link_local:
                found.append(address)
    found.sort(key=lambda address: address.version)  # what most machines can reach comes first
    return [str(address) for address in found[:MOST_ADDRESSES]] or ["::1" if ":" in host else "127.0.0.1"]
