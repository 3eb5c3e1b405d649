"""`wide shares`: who did how much of a run, how much of that another node has computed too, and a statement of it that
the pool signs. Knows run.db and the pool's keys; whoever checks a statement needs neither.
"""

from __future__ import annotations

import base64
import binascii
import json
import ssl
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wide.dashboard.account import RUNNING, brief, saved_sha256
from wide.dashboard.tables import as_text
from wide.errors import UsageError
from wide.launch.keys import CERTIFICATE, KEY, shown_of, write_secret
from wide.store.reading import Reading, found
from wide.transport.tls import fingerprint
from wide.wire.words import line

SCHEMA, FILE = "wide.shares/1", "shares.json"
ALGORITHM = "ECDSA with SHA-256 over the statement as JSON: keys sorted, no spaces, ASCII"
FIRST = "first"  # the invite that `wide serve` prints is nobody's in particular
MOST_NBYTES, LATEST_S = 16 << 20, 1 << 34  # the year 2514
NODES = "SELECT node, name, host, max(joined_at) FROM nodes GROUP BY node"
MACHINES = """SELECT visits.node, machines.id, machines.name, invites.name, max(visits.at) FROM visits
    JOIN machines ON machines.id = visits.machine LEFT JOIN invites ON invites.id = machines.invite
    GROUP BY visits.node"""
DONE = "SELECT node, sum(samples) FROM ledger WHERE node IS NOT NULL GROUP BY node"


@dataclass
class Share:
    """What one machine has done. Its owner is whom its invite was for, in the pool's words; empty, if that does not
    say. How a machine is called are its own words.
    """

    owner: str
    machine: str
    nodes: list[int] = field(default_factory=list)
    samples: int = 0
    verified_samples: int = 0


@dataclass(frozen=True)
class Shares:
    """Of a run, as far as it has come; `file` is where the signed statement is, if there is one."""

    folder: Path
    statement: dict[str, Any]
    shares: list[Share]
    file: str = ""

    @property
    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "statement": self.statement, "file": self.file}

    @property
    def words(self) -> str:
        total = sum(share.samples for share in self.shares)
        rows = [_row(share, total) for share in self.shares]
        lines = [as_text(["owner", "machine", "nodes", "samples", "verified", "share"], rows)] if rows else []
        verified = sum(share.verified_samples for share in self.shares)
        lines.append(f"{total:,} samples, {verified:,} of them verified")
        if self.file:
            lines.append(f"signed: {self.file}; to check it: wide shares --check {self.file} --certificate PEM")
        elif not (self.folder / CERTIFICATE).exists():
            lines.append("not signed: only pools of `wide serve` have a certificate")
        return "\n".join(lines)


@dataclass(frozen=True)
class Checked:
    """Is a statement what the owner of that certificate has signed?"""

    holds: bool
    words: str
    signed_by: str = ""
    statement: dict[str, Any] = field(default_factory=dict)

    @property
    def as_json(self) -> dict[str, Any]:
        told = {"holds": self.holds, "signed_by": self.signed_by, "words": self.words, "statement": self.statement}
        return {"schema": f"{SCHEMA}/check"} | told


def shares_of(run: str | Path) -> Shares:
    """Raises UsageError, if there is no run."""
    folder = found(run)
    with Reading(folder) as db:
        shares = _by_machine(db)
    told = brief(folder)
    statement = {
        "run": line(folder.resolve().name),
        "job": told.job,
        "state": told.state,
        "strategy": told.strategy,
        "steps": told.steps,
        "weights_sha256": saved_sha256(folder) if told.state != RUNNING else "",
        "made_at": int(time.time()),
        "samples": sum(share.samples for share in shares),
        "verified_samples": sum(share.verified_samples for share in shares),
        "shares": [vars(share) for share in shares],
    }
    return Shares(folder, statement, shares)


def _by_machine(db: Reading) -> list[Share]:
    """Those who did most first."""
    samples: dict[int, int] = dict(db.rows("shares", "SELECT node, samples FROM shares"))
    for node, count in db.rows("ledger", DONE):
        samples[node] = samples.get(node, 0) + (count or 0)
    verified = dict(db.rows("verified", "SELECT node, samples FROM verified"))
    names = {node: (name, host) for node, name, host, _ in db.rows("nodes", NODES)}
    came = {node: (id_, name, owner) for node, id_, name, owner, _ in db.rows("visits", MACHINES)}
    found: dict[tuple[str, ...], Share] = {}
    for node, count in sorted(samples.items()):
        name, host = (line(str(word or "")) for word in names.get(node, ("", "")))
        id_, machine, owner = (line(str(word or "")) for word in came.get(node, ("", host or name, "")))
        owner = owner if owner != FIRST else ""
        share = found.setdefault((owner, id_, machine), Share(owner, machine))
        share.nodes.append(node)
        share.samples += count
        share.verified_samples += verified.get(node, 0)
    return sorted(found.values(), key=lambda share: -share.samples)


def _row(share: Share, total: int) -> list[str]:
    part = f"{share.samples / total:.1%}" if total else ""
    counts = [f"{len(share.nodes)}", f"{share.samples:,}", f"{share.verified_samples:,}"]
    return [share.owner, share.machine, *counts, part]


def signed(shares: Shares) -> Shares:
    """With a statement in the run's folder, which anybody can check who has the pool's certificate."""
    folder = shares.folder
    if not (folder / CERTIFICATE).exists() or not (folder / KEY).exists():
        raise UsageError(f"{folder} has no certificate, as only pools of `wide serve` have: its shares are not signed")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        pem = (folder / CERTIFICATE).read_text()
        key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
        statement = {"pool": fingerprint(ssl.PEM_cert_to_DER_cert(pem)).hex()} | shares.statement
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind")
        signature = key.sign(_canonical(statement), ec.ECDSA(hashes.SHA256()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"the pool's key in {folder} cannot be used ({error})") from None
    whole = {"schema": SCHEMA, "statement": statement, "algorithm": ALGORITHM}
    whole |= {"certificate": pem, "signature": base64.b64encode(signature).decode()}
    try:
        write_secret(folder / FILE, json.dumps(whole, indent=1) + "\n")  # whole, or not there
        (folder / FILE).chmod(0o644)  # it is for others
    except OSError as error:
        raise UsageError(f"{folder / FILE} cannot be written ({error.strerror})") from None
    return replace(shares, statement=statement, file=str(folder / FILE))


def check(file: Path, certificate: Path | None) -> Checked:
    """Against that certificate; without one, against the one that the statement brings along."""
    try:
        if file.stat().st_size > MOST_NBYTES:
            raise ValueError("it is too large")
        told = json.loads(file.read_text(encoding="utf-8"))
        statement, pem, signature = (
            told["statement"],
            told["certificate"],
            base64.b64decode(told["signature"], validate=True),
        )
        if told["schema"] != SCHEMA or not isinstance(statement, dict) or not isinstance(pem, str):
            raise ValueError("it has another form")
        made_at = statement.get("made_at", 0)
        if type(made_at) is not int or not 0 <= made_at <= LATEST_S:
            raise ValueError("made_at is no time")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{file} is not a statement of shares ({why})") from None
    der = _der(pem, str(file))
    by = shown_of(fingerprint(der))
    if certificate is not None and _der(_text(certificate), str(certificate)) != der:
        ours = shown_of(fingerprint(_der(_text(certificate), str(certificate))))
        return Checked(False, f"{file} was signed by the pool {by}, and {certificate} is the pool {ours}", by)
    if statement.get("pool") != fingerprint(der).hex() or not _is_signed(pem, signature, _canonical(statement)):
        return Checked(False, f"{file} does not hold: it is not what the pool {by} has signed", by)
    whose = "" if certificate is not None else " (is it the one that `wide serve` showed? --certificate PEM compares)"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(made_at))
    return Checked(True, f"{file} holds: signed on {made} by the pool {by}{whose}", by, statement)


def _is_signed(pem: str, signature: bytes, data: bytes) -> bool:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = x509.load_pem_x509_certificate(pem.encode()).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        return True
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False


def _canonical(statement: dict[str, Any]) -> bytes:
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def _der(pem: str, where: str) -> bytes:
    try:
        return ssl.PEM_cert_to_DER_cert(pem)
    except (ValueError, binascii.Error):
        raise UsageError(f"{where} has no certificate in PEM form") from None
