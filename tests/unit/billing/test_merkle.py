"""Merkle trees against the test vectors of Certificate Transparency and the RFC's own recursive words."""

from __future__ import annotations

import hashlib

import pytest

from billing import merkle

# github.com/google/certificate-transparency, merkle_tree_test.cc: the inputs and the roots over the first n of them.
INPUTS = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def naive_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, word for word."""
    if len(leaves) <= 1:
        return leaves[0] if leaves else hashlib.sha256(b"").digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + naive_root(leaves[:k]) + naive_root(leaves[k:])).digest()


def naive_path(leaves: list[bytes], index: int) -> list[bytes]:
    """RFC 6962, section 2.1.1, word for word."""
    if len(leaves) == 1:
        return []
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    if index < k:
        return [*naive_path(leaves[:k], index), naive_root(leaves[k:])]
    return [*naive_path(leaves[k:], index - k), naive_root(leaves[:k])]


def some(count: int) -> list[bytes]:
    return [merkle.leaf_hash(b"%d" % number) for number in range(count)]


def test_the_roots_of_the_published_vectors() -> None:
    leaves = [merkle.leaf_hash(bytes.fromhex(data)) for data in INPUTS]
    assert [merkle.root(leaves[:size]).hex() for size in range(1, 9)] == ROOTS
    assert merkle.root([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("size", range(1, 35))
def test_every_leaf_is_proven_and_nothing_else_is(size: int) -> None:
    leaves = some(size)
    root = merkle.root(leaves)
    assert root == naive_root(leaves)
    for index in range(size):
        path = merkle.path(leaves, index)
        assert path == naive_path(leaves, index)
        assert merkle.root_of(leaves[index], index, size, path) == root
        other = merkle.leaf_hash(b"another")
        assert merkle.root_of(other, index, size, path) != root
        assert merkle.root_of(leaves[index], (index + 1) % size, size, path) != root or size == 1
        assert merkle.root_of(leaves[index], index, size, [*path, other]) is None
        if path:
            assert merkle.root_of(leaves[index], index, size, path[:-1]) != root
            assert merkle.root_of(leaves[index], index, size, [other, *path[1:]]) != root


def test_a_place_that_is_not_in_the_tree_has_no_path() -> None:
    for index in (-1, 3):
        with pytest.raises(IndexError):
            merkle.path(some(3), index)
        assert merkle.root_of(some(1)[0], index, 3, []) is None
