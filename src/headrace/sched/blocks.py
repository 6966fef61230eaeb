"""The ids of one KV group's blocks: which are free, who shares them, and what text each sealed one holds.

Owns integers, reference counts and the hash chain of the prefix cache. Refuses to know sequences, positions and bytes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from headrace.types import InvariantError

RECYCLED_PER_FRESH = 3  # see BlockPool
NO_BLOCK = -1


class Link(NamedTuple):
    """A full block's content: its tokens, and the digest of all that comes before them."""

    digest: bytes  # of parent and tokens: names the block and its whole prefix
    parent: bytes  # digest of the link before, or chain_root(salt)
    tokens: bytes  # the block's token ids, as array('i') lays them out


def chain_root(salt: bytes) -> bytes:
    """The parent of every first block under `salt`; chains of different salts never meet.

    Roots and links are hashed under different prefixes, so that no salt can be chosen to equal a link's input.
    """
    return sha256(b"root" + salt).digest()


def chain_link(parent: bytes, tokens: array[int]) -> Link:
    """The link of a full block with `tokens` that follows `parent`."""
    content = tokens.tobytes()
    return Link(sha256(b"link" + parent + content).digest(), parent, content)


class BlockPool:
    """The blocks of one KV group.

    A block is free (nobody refers to it) or used. A used block can be sealed: its content is final and can be matched
    by its digest. A free block stays sealed until it is taken again, so what was freed longest ago is forgotten first.

    Blocks are taken for the first time in ascending order. The first `num_eager` (default: all) are, before anything
    is forgotten; of the others, one for every RECYCLED_PER_FRESH that are forgotten: memory that nothing has used yet
    is slow to come by, many times slower than a step's use of it where the machine is a virtual one.
    """

    def __init__(self, num_blocks: int, block_size: int, num_eager: int | None = None) -> None:
        self._block_size = block_size
        self._num_eager = num_blocks if num_eager is None else num_eager
        self._num_taken = 0  # blocks from this one on were never used
        self._num_recycled = 0  # since a block beyond the eager ones was taken for the first time
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._link: list[Link | None] = [None] * num_blocks
        self._sealed: dict[bytes, int] = {}  # digest -> block
        self._free: OrderedDict[int, None] = OrderedDict()  # that were used; next to be taken first

    @property
    def num_blocks(self) -> int:
        return len(self._ref_count)

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_taken

    @property
    def num_sealed(self) -> int:
        return len(self._sealed)

    def is_free(self, block: int) -> bool:
        return self._ref_count[block] == 0

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def is_sealed(self, block: int) -> bool:
        return self._link[block] is not None

    def match(self, link: Link) -> int:
        """The block that holds `link`, or NO_BLOCK. Tokens and parent are compared, the digest alone is not trusted."""
        block = self._sealed.get(link.digest, NO_BLOCK)
        return block if block != NO_BLOCK and self._link[block] == link else NO_BLOCK

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one reference and nothing sealed. Raises InvariantError if there are fewer."""
        if count > self.num_free:
            raise InvariantError(f"{count} blocks were asked of a pool that has {self.num_free} free")
        return [self._take_one() for _ in range(count)]

    def _is_fresh_next(self) -> bool:
        if self._num_taken == self.num_blocks:
            return False
        if not self._free:
            return True
        if self._link[next(iter(self._free))] is None:
            return False
        return self._num_taken < self._num_eager or self._num_recycled >= RECYCLED_PER_FRESH

    def _take_one(self) -> int:
        if self._is_fresh_next():
            block, self._num_taken, self._num_recycled = self._num_taken, self._num_taken + 1, 0
        else:
            block, _ = self._free.popitem(last=False)
        if (link := self._link[block]) is not None:
            del self._sealed[link.digest]
            self._link[block] = None
            self._num_recycled += 1
        self._ref_count[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a sealed block."""
        if self._link[block] is None:
            raise InvariantError(f"block {block} is not sealed, so it cannot be shared")
        if self._ref_count[block] == 0:
            del self._free[block]
        self._ref_count[block] += 1

    def seal(self, block: int, link: Link) -> None:
        """Let `block` be found by `link`. If another block already holds the same content, that one stays the match."""
        if self._ref_count[block] == 0 or self._link[block] is not None:
            raise InvariantError(f"block {block} is free or sealed already")
        if len(link.tokens) != self._block_size * array("i").itemsize:
            raise InvariantError(f"block {block} is not full, so it cannot be sealed")
        if link.digest not in self._sealed:
            self._sealed[link.digest] = block
            self._link[block] = link

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's `blocks`, in order of position.

        The tail is freed first: it is forgotten first, so the prefix, which more requests share, lives longest. What
        was never sealed has nothing to remember and is the first to be taken again.
        """
        for block in reversed(blocks):
            if self._ref_count[block] <= 0:
                raise InvariantError(f"block {block} is free already")
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._free[block] = None
                if self._link[block] is None:
                    self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise InvariantError unless every block is free or used, and the index and the sealed blocks agree."""
        if any(count < 0 for count in self._ref_count):
            raise InvariantError("a block has less than no references")
        free = {*self._free, *range(self._num_taken, self.num_blocks)}
        if {block for block, count in enumerate(self._ref_count) if count == 0} != free:
            raise InvariantError("the free list and the reference counts disagree")
        if {link.digest: block for block, link in enumerate(self._link) if link is not None} != self._sealed:
            raise InvariantError("the index and the sealed blocks disagree")
