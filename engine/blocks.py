"""The paged pool of KV-cache blocks and the prefix cache that lives in it.

Knows: which physical blocks are in use and by how many sequences, and which hold the keys and values of
which tokens. Does not know: sequences, the order of work, tensors.

A block is shared by its *key*: a hash over its parent's key and its tokens, and at the root of the chain
over ("tenant", tenant, adapter content digest, cache salt), each behind its length, so that no two different
identities give one root, or over ("public", adapter content digest, cache salt) for a salt that the operator has
published: then all tenants share. A hit also compares the tokens: a collision is a miss, never another's answer.
Every operation is O(1) per block, and a look-up touches nothing but what has the very key that is asked for: how
long it takes says nothing about what other tenants have there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class IntegrityError(RuntimeError):
    """The pool contradicts itself: a fault of ours, and no request may go on in it."""


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free; the scheduler looks before it asks."""


def cache_root(tenant: str, adapter_digest: str, cache_salt: str, *, public: bool = False) -> bytes:
    """The 32-byte identity that a chain of block keys begins with: of a tenant, or of a salt that is everybody's."""
    root = hashlib.blake2b(digest_size=32, person=b"meterhouse.root")
    identity = ("public",) if public else ("tenant", tenant)
    for field in (*identity, adapter_digest, cache_salt):
        raw = field.encode("utf-8", "surrogatepass")
        root.update(len(raw).to_bytes(8, "little") + raw)
    return root.digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The 32-byte key of a full block whose predecessor's key (or root) is `parent`."""
    raw = array("Q", tokens).tobytes()
    return hashlib.blake2b(parent + raw, digest_size=32, person=b"meterhouse.block").digest()


class _Block:
    __slots__ = ("key", "parent", "references", "tokens")

    def __init__(self) -> None:
        self.references = 0
        self.key: bytes | None = None  # set while the content is shareable
        self.parent: bytes = b""
        self.tokens: tuple[int, ...] = ()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Free blocks keep what they hold until they are needed.

    Invariants, checked by `check_integrity`: a block is free exactly when nothing refers to it; a key names
    one block, and that block knows its key; references equal the appearances in the block tables.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first: the next to be reused
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nothing refers to, the cached ones among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def is_sole(self, block: int) -> bool:
        """Whether one table alone refers to it."""
        return self._blocks[block].references == 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of nobody's, the longest unused first; what they held is forgotten."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._blocks[block].references = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Refer to blocks that hold something already, free or not."""
        for block in blocks:
            self._free.pop(block, None)
            self._blocks[block].references += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. Given in table order: the end of a prefix is reused before its start."""
        for block in reversed(blocks):
            state = self._blocks[block]
            if state.references < 1:
                raise IntegrityError(f"block {block} is released more often than taken")
            state.references -= 1
            if state.references == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=state.key is not None)  # nothing to keep: reuse it first

    def publish(self, block: int, key: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """Make a computed full block findable. The first block of a key stays; a twin is not an error."""
        state = self._blocks[block]
        if state.references < 1 or len(tokens) != self.block_size:
            raise IntegrityError("only a full block in use can be published")
        if key in self._by_key or state.key is not None:
            return
        state.key, state.parent, state.tokens = key, parent, tuple(tokens)
        self._by_key[key] = block

    def find(self, key: bytes, parent: bytes, tokens: Sequence[int]) -> int | None:
        """The block that holds exactly these tokens behind exactly this prefix."""
        block = self._by_key.get(key)
        if block is None:
            return None
        state = self._blocks[block]
        return block if state.parent == parent and state.tokens == tuple(tokens) else None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `IntegrityError` where the pool and the tables of all sequences disagree. O(blocks)."""
        for _ in self.checked_slices(tables):
            pass

    def checked_slices(self, tables: Iterable[Sequence[int]], slice_blocks: int = 4096) -> Iterator[None]:
        """The same a slice at a time, to be dropped before anything changes."""
        references = Counter(block for table in tables for block in table)
        keyed = 0
        for start in range(0, self.num_blocks, slice_blocks):
            for block in range(start, min(start + slice_blocks, self.num_blocks)):
                self._check_block(block, references[block])
                keyed += self._blocks[block].key is not None
            yield
        if keyed != len(self._by_key):
            raise IntegrityError("a key names a block that does not know it")

    def _check_block(self, block: int, references: int) -> None:
        state = self._blocks[block]
        if state.references != references:
            raise IntegrityError(f"block {block}: {state.references} references, {references} in tables")
        if (state.references == 0) != (block in self._free):
            raise IntegrityError(f"block {block}: free and in use at once, or neither")
        if state.key is not None and self._by_key.get(state.key) != block:
            raise IntegrityError(f"block {block}: its key names another block")

    def _forget(self, block: int) -> None:
        state = self._blocks[block]
        if state.key is not None:
            del self._by_key[state.key]
            state.key, state.parent, state.tokens = None, b"", ()
