"""The random numbers of sampling: one for each token, a function of (seed, choice, position) and of nothing else.

Knows: how a choice gets its key and a key its numbers. So a choice draws the same alone, in any batch, in any order and
after it was preempted. Does not know: what is drawn with them.

The numbers of a key are those of the generator SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) started there, any of
them computed directly; keys are hashed, so that no two streams are parts of each other.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine.types import Request

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ATTEMPTS = 0xD1342543DE82EF95  # odd and without a pattern: the keys of two attempts have nothing in common


def stream_key(request: Request, choice: int) -> int:
    """64 bits hashed from the seed, or without one from the request's id, which no other request has."""
    seed = request.sampling.seed
    return _key(request.id if seed is None else seed, choice)


@lru_cache(maxsize=4096)
def _key(origin: str | int, choice: int) -> int:
    said = origin.encode() if isinstance(origin, str) else struct.pack("<q", origin)
    digest = hashlib.blake2b(struct.pack("<?I", isinstance(origin, str), choice) + said, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], attempt: int = 0
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) of 53 bits: for each key the one at its position (0 for the first sampled token).

    Each further `attempt` at the same position has a number of its own.
    """
    offset = np.uint64((attempt * _ATTEMPTS) & (2**64 - 1))
    mixed = (keys ^ offset) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    numbers: npt.NDArray[np.float64] = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return numbers
