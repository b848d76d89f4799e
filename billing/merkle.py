"""Merkle trees as RFC 6962 has them (https://www.rfc-editor.org/rfc/rfc6962, section 2.1).

A leaf is hashed behind a 0x00 and an inner node behind a 0x01, so no leaf can be passed off as a node. The left part of
a tree of n leaves has as many as the greatest power of two below n. Hashes are SHA-256, 32 bytes each.

Pure. Does not know: what the leaves are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

EMPTY = hashlib.sha256(b"").digest()
"""The root of a tree without leaves."""


def leaf_hash(data: bytes) -> bytes:
    """The hash of a leaf's bytes."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The root over leaf hashes in their order (`MTH`)."""
    *_, top = _levels(leaves)
    return top[0] if top else EMPTY


def path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The siblings that lead from the leaf at `index` to the root, the lowest first (`PATH`). Raises `IndexError`."""
    if not 0 <= index < len(leaves):
        raise IndexError(index)
    found: list[bytes] = []
    for level in _levels(leaves):
        sibling = index ^ 1
        if sibling < len(level):
            found.append(level[sibling])
        index //= 2
    return found


def root_of(leaf: bytes, index: int, size: int, siblings: Sequence[bytes]) -> bytes | None:
    """The root of a tree of `size` leaves that has this one at `index` by this path; None where no path is like that.

    The verification of RFC 9162, section 2.1.3.2.
    """
    if not 0 <= index < size:
        return None
    place, last, found = index, size - 1, leaf
    for sibling in siblings:
        if last == 0:
            return None
        if place & 1 or place == last:
            found = node_hash(sibling, found)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            found = node_hash(found, sibling)
        place, last = place >> 1, last >> 1
    return found if last == 0 else None


def _levels(leaves: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The tree level by level from its leaves to its root; a node without a sibling goes up as it is.

    That gives the RFC's tree: the left part of every split is a whole number of pairs at each of these levels.
    """
    level: Sequence[bytes] = leaves
    yield level
    while len(level) > 1:
        pairs = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = [*pairs, level[-1]] if len(level) % 2 else pairs
        yield level
