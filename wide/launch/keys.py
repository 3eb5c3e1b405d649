"""A pool's key, certificate and root secret, and a run's key for digests, in its folder, where only their owner can
read them. A run that goes on keeps them: nobody has to join again. Needs `cryptography`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wide.errors import UsageError
from wide.transport.listener import Tls
from wide.transport.tls import fingerprint, server_context
from wide.wire.invite import PIN_NBYTES
from wide.wire.proof import ROOT_NBYTES

CERTIFICATE, KEY, ROOT = "certificate.pem", "key.pem", "secret"
DIGESTS, DIGESTS_NBYTES = "digests.key", 16  # whoever knew it could make a wrong update with the right digest
VALID_DAYS = 3650  # nobody checks it but browsers: nodes know the certificate itself


@dataclass(frozen=True, repr=False)
class PoolKeys:
    """`binding` is the certificate's hash, `pin` its beginning, as invites have it."""

    root: bytes
    binding: bytes
    tls: Tls

    @property
    def pin(self) -> bytes:
        return self.binding[:PIN_NBYTES]

    @property
    def shown(self) -> str:
        """The first bytes of the certificate's hash, to be compared by eye."""
        return shown_of(self.binding)


def shown_of(binding: bytes) -> str:
    text = binding.hex()
    return " ".join(text[i : i + 4] for i in range(0, 16, 4))


def keys_in(folder: Path) -> PoolKeys:
    """Those of the run in that folder; new ones, if it has none yet."""
    try:
        if not (folder / ROOT).exists():  # the last of the three to be written
            _make(folder)
        certificate = ssl.PEM_cert_to_DER_cert((folder / CERTIFICATE).read_text())
        context = server_context(folder / CERTIFICATE, folder / KEY)
        root = bytes.fromhex((folder / ROOT).read_text())
        if len(root) != ROOT_NBYTES:
            raise ValueError("it has another length")
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise UsageError(
            f"the pool's keys in {folder} cannot be read or made ({error}); without {ROOT}, {KEY} and {CERTIFICATE} "
            "new ones are made, and every machine has to join again"
        ) from None
    binding = fingerprint(certificate)
    return PoolKeys(root, binding, Tls(context, binding))


def root_of(folder: Path) -> bytes:
    """The root secret of a pool that may be running."""
    try:
        return bytes.fromhex((folder / ROOT).read_text())
    except (OSError, ValueError):
        raise UsageError(f"{folder} has no pool's secret: only the runs of `wide serve` can be joined") from None


def digests_key(folder: Path) -> bytes | None:
    """With which the run in that folder makes digests of updates; None, if it has made none yet."""
    path = folder / DIGESTS
    try:
        key = bytes.fromhex(path.read_text())
        if len(key) != DIGESTS_NBYTES:
            raise ValueError("it has another length")
        return key
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); without it, the ledger's digests begin anew") from None


def new_digests_key(folder: Path) -> bytes:
    key = secrets.token_bytes(DIGESTS_NBYTES)
    try:
        write_secret(folder / DIGESTS, key.hex() + "\n")
    except OSError as error:
        raise UsageError(f"{folder / DIGESTS} cannot be written ({error.strerror})") from None
    return key


def write_secret(path: Path, text: str) -> None:
    """Readable by its owner alone, from its first byte on; whole, or not there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with _removed(temporary):
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextlib.contextmanager
def _removed(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    try:
        from cryptography import x509
    except ImportError:
        raise UsageError("no certificate can be made without `cryptography`: pip install cryptography") from None
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a pool of WIIIIIDE")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8, none = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_secret(folder / KEY, key.private_bytes(pem, pkcs8, none).decode())
    write_secret(folder / CERTIFICATE, certificate.public_bytes(pem).decode())
    write_secret(folder / ROOT, secrets.token_hex(ROOT_NBYTES) + "\n")
