"""The invite: how to find a pool, how to know it, and a secret to be let in by, in one string that survives a chat.

    wide1_ + base32, lower case, of   version u8 · flags u8 · id 4 B · expiry u32 (minutes since 1970) · how many
    addresses u8 · each: kind u8 (4, 6, or 1: a name) · 4 B, 16 B, or length u8 and name · port u16
    · SHA-256 of the certificate, cut to 20 B · secret 16 B · crc16 u16

All numbers are big-endian. Knows the layout; knows no sockets and no clock.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import struct

import msgspec

from wide.errors import UsageError
from wide.wire.proof import SECRET_NBYTES

PREFIX = "wide1_"
VERSION = 1
PIN_NBYTES = 20
MOST_ADDRESSES = 8
_HEAD = struct.Struct(">BB4sIB")
_PORT, _CRC = struct.Struct(">H"), struct.Struct(">H")
_TAIL_NBYTES = PIN_NBYTES + SECRET_NBYTES
IPV4, IPV6, NAME = 4, 6, 1

Address = tuple[str, int]  # host, port


class Invite(msgspec.Struct, frozen=True):
    """`id` is four bytes in hex; `pin` is the beginning of the SHA-256 of the pool's certificate."""

    id: str
    expires_min: int
    addresses: tuple[Address, ...]
    pin: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"<Invite {self.id}>"  # never the secret

    @property
    def expires_at(self) -> float:
        return 60.0 * self.expires_min

    def encode(self) -> str:
        packed = _HEAD.pack(VERSION, 0, bytes.fromhex(self.id), self.expires_min, len(self.addresses))
        packed += b"".join(map(_pack, self.addresses)) + self.pin + self.secret
        packed += _CRC.pack(binascii.crc_hqx(packed, 0))
        return PREFIX + base64.b32encode(packed).decode().rstrip("=").lower()


def parse(text: str) -> Invite:
    """Raises UsageError, in words: what is wrong with it."""
    word = "".join(text.split()).lower()  # as mail programs and narrow terminals break it
    word = word[max(word.find(PREFIX), 0) :]  # whoever pastes the whole line means the invite in it
    if not word.startswith(PREFIX):
        newer = re.match(r"wide(\d+)_", word)
        if newer:
            raise UsageError(f"this invite is of kind {newer[1]}, this version knows kind 1: update wide")
        raise UsageError("this is no invite: one begins with wide1_, as `wide serve` printed it")
    letters = word[len(PREFIX) :]
    if strange := re.search(r"[^a-z2-7]", letters):
        raise UsageError(f"the invite was misread: {strange[0]!r} is in no invite; copy it once more")
    whole = len(letters) // 8 * 8 + max(n for n in (0, 2, 4, 5, 7) if n <= len(letters) % 8)
    packed = base64.b32decode((letters[:whole] + "=" * (-whole % 8)).upper())
    try:
        invite, nbytes = _unpack(packed)
    except (struct.error, IndexError):
        raise UsageError("the invite is cut: its end is missing; copy it once more") from None
    if len(packed) < nbytes + _CRC.size:
        raise UsageError("the invite is cut: its end is missing; copy it once more")
    if binascii.crc_hqx(packed, 0) or not _is_sound(invite, word):
        raise UsageError("the invite was misread: its check digits do not fit; copy it once more")
    return invite


def _is_sound(invite: Invite, word: str) -> bool:
    """Could `wide serve` have made it, letter by letter?"""
    are_named = all(re.fullmatch(r"[\w.:-]+", host, re.ASCII) and port for host, port in invite.addresses)
    try:
        return are_named and 0 < len(invite.addresses) <= MOST_ADDRESSES and invite.encode() == word
    except UnicodeError:
        return False


def _pack(address: Address) -> bytes:
    host, port = address
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("idna")
        return bytes((NAME, len(name))) + name + _PORT.pack(port)
    return bytes((number.version,)) + number.packed + _PORT.pack(port)


def _unpack(packed: bytes) -> tuple[Invite, int]:
    """And how many bytes that took. What a misread letter made of it is found by the check digits."""
    version, _, id_, expires_min, count = _HEAD.unpack_from(packed)
    if version != VERSION:
        raise UsageError(f"this invite is of version {version}, this program knows version {VERSION}: update wide")
    place, addresses = _HEAD.size, []
    for _ in range(count):
        host, place = _host(packed, place)
        (port,) = _PORT.unpack_from(packed, place)
        place += _PORT.size
        addresses.append((host, port))
    pin, secret = packed[place : place + PIN_NBYTES], packed[place + PIN_NBYTES : place + _TAIL_NBYTES]
    return Invite(id_.hex(), expires_min, tuple(addresses), pin, secret), place + _TAIL_NBYTES


def _host(packed: bytes, place: int) -> tuple[str, int]:
    kind = packed[place]
    if kind == NAME:
        end = place + 2 + packed[place + 1]
        return packed[place + 2 : end].decode("ascii", errors="replace"), end
    end = place + 1 + (4 if kind == IPV4 else 16)
    if end > len(packed):
        raise IndexError
    if kind not in (IPV4, IPV6):
        raise UsageError("the invite was misread: its check digits do not fit; copy it once more")
    return str(ipaddress.ip_address(packed[place + 1 : end])), end
