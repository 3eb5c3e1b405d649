"""Who may look, and who may steer: by where a request came from, and by the secret it brings. Knows headers only.

A secret is a bearer token that the page itself adds to each request: there are no cookies, so another site can make a
browser send requests here, but none that count. On this machine looking needs no secret; names of other sites that lead
here (DNS rebinding) are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["viewer", "admin"]
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class No(Exception):
    """`status` as HTTP has it; the words are for whoever asked."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


@dataclass(frozen=True)
class Doorkeeper:
    """`secrets` are the ones that are good now, by role; `is_here`: only this machine can come, and needs none to look;
    `may_steer`: somebody said --control.
    """

    is_here: bool
    may_steer: bool
    secrets: Callable[[], Mapping[Role, str]]

    def check_site(self, headers: Mapping[str, str], is_page: bool = False) -> None:
        """Does a browser ask on behalf of this page? The page itself holds no data: links to it may be anywhere."""
        host = _name(headers.get("host", ""))
        if self.is_here and not _is_loopback(host):
            raise No(421, "this page is for its own machine: ask for 127.0.0.1 or localhost")
        if is_page:
            return
        origin = headers.get("origin", "")
        is_foreign = origin not in ("", "null") and origin.partition("://")[2] != headers.get("host", "")
        if is_foreign or origin == "null" or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise No(403, "this was asked by another site")

    def role(self, headers: Mapping[str, str]) -> Role:
        """Raises No, if it has none."""
        kind, _, said = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            for role, secret in self.secrets().items():
                if hmac.compare_digest(said.strip().encode(), secret.encode()):
                    return role
            raise No(401, "this secret is wrong, or was revoked: ask for a new link")
        if self.is_here:
            return "viewer"
        raise No(401, "a secret is needed: open the whole link, as it was printed")

    def check_admin(self, headers: Mapping[str, str]) -> None:
        if not self.may_steer:
            raise No(403, "nothing can be changed from here: start the dashboard with --control")
        if self.role(headers) != "admin":
            raise No(403, "the admin's secret is needed for that: open the link that says so")


def _name(host: str) -> str:
    """Without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
