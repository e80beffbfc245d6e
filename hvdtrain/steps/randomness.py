"""Seeds as a function of where the training stands: a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib
import struct


def seed_of(*place: int) -> int:
    """A seed below 2**63 from whole numbers such as (seed, update, rank).

    BLAKE2b spreads neighbouring places over unrelated seeds; the same place gives the same seed on
    every machine.
    """
    packed = struct.pack(f"<{len(place)}Q", *(number % 2**64 for number in place))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
