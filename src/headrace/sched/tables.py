"""The block tables of sequences over all KV groups: how they grow, share a prefix, drop a window's past and are freed.

Owns the pools. Refuses to know budgets, orders and which sequence deserves a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from headrace.sched.blocks import NO_BLOCK, BlockPool
from headrace.sched.sequence import Sequence
from headrace.types import InvariantError, KVGroup, KVKind, Limits

UNBOUNDED = 2**62  # tokens: the window of a group that keeps all, more than any sequence can have


class BlockTables:
    """All groups page alike, so a sequence's tables have one length and only what a window keeps differs.

    A window group keeps the last `window` computed positions, whole blocks of them: the position that comes next sees
    those and itself. (A model whose window counts the position itself sees one less.)
    """

    def __init__(self, groups: tuple[KVGroup, ...], limits: Limits, *, is_caching: bool):
        num_blocks, block_size = limits.num_blocks, limits.block_size
        self._block_size = block_size
        self._is_caching = is_caching
        self._pools = tuple(
            BlockPool(count, block_size, num_eager)
            for count, num_eager in zip(num_blocks, limits.num_eager or num_blocks, strict=True)
        )
        self._windows = tuple(group.window if group.kind is KVKind.WINDOW else UNBOUNDED for group in groups)
        self._window_groups = tuple(g for g, group in enumerate(groups) if group.kind is KVKind.WINDOW)
        self._full_pools = tuple(self._pools[g] for g in range(len(groups)) if g not in self._window_groups)
        # Blocks that window + 1 positions can touch at most; no more than that is live while tokens come one by one.
        self._spans = tuple(
            min(count, -(-window // block_size) + 1) for count, window in zip(num_blocks, self._windows, strict=True)
        )

    @property
    def num_free(self) -> tuple[int, ...]:
        return tuple(pool.num_free for pool in self._pools)

    @property
    def num_sealed(self) -> tuple[int, ...]:
        return tuple(pool.num_sealed for pool in self._pools)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that can run when it has every block to itself."""
        return min(
            UNBOUNDED if pool.num_blocks > -(-window // self._block_size) else pool.num_blocks * self._block_size
            for pool, window in zip(self._pools, self._windows, strict=True)
        )

    @property
    def is_windowed(self) -> bool:
        """Whether tables change while sequences move on, beyond growing."""
        return bool(self._window_groups)

    def _first_kept(self, g: int, position: int) -> int:
        """The first block of group `g` that `position` and the positions after it read."""
        return max(0, position - self._windows[g]) // self._block_size

    # Growing and giving back ----------------------------------------------------------------------------------

    def min_free(self) -> int:
        """Blocks that a table can grow by: it grows in every group at once."""
        return min([pool.num_free for pool in self._pools])

    def room(self, seq: Sequence, num_free: int) -> int:
        """Tokens that `seq` could be fed if it took `num_free` blocks."""
        return seq.num_slots + num_free * self._block_size - seq.num_computed

    def claims(self, seqs: SequenceOf[Sequence], max_count: int) -> list[int]:
        """Tokens that each of `seqs` could be fed, `max_count` at most, when those before it take blocks first."""
        num_free = self.min_free()
        counts = []
        for seq in seqs:
            count = min(max_count, seq.num_wanted, self.room(seq, num_free))
            num_free -= max(0, self._num_lacking(seq, seq.num_computed + count))
            counts.append(count)
        return counts

    def _num_lacking(self, seq: Sequence, end: int) -> int:
        """Blocks that `seq` has to take for the positions before `end`; less than 0 if it has more than these need."""
        return -(-(end - seq.num_slots) // self._block_size)

    def grow(self, seq: Sequence, end: int) -> None:
        """Give `seq` slots for the positions before `end`, of which it lacks some. The blocks must be there."""
        count = self._num_lacking(seq, end)
        for pool, table in zip(self._pools, seq.tables, strict=True):
            table.extend(pool.take(count))
        seq.num_slots += count * self._block_size

    def drop_past(self, seq: Sequence) -> bool:
        """Free the blocks that no position still to be computed can see; whether there were any."""
        has_dropped = False
        for g in self._window_groups:
            first, old = self._first_kept(g, seq.num_computed), seq.num_dropped[g]
            if first <= old:
                continue
            self._pools[g].release(seq.tables[g][old:first])
            seq.tables[g][old:first] = array("i", [NO_BLOCK] * (first - old))
            seq.num_dropped[g] = first
            has_dropped = True
        return has_dropped

    def release(self, seq: Sequence) -> None:
        """Free all that `seq` holds; nothing of it is computed any more."""
        for g, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            pool.release(table[seq.num_dropped[g] :])
            seq.num_dropped[g] = 0
            del table[:]
        seq.num_slots = seq.num_computed = seq.num_sealed = 0

    # The prefix cache -----------------------------------------------------------------------------------------

    def seal(self, seq: Sequence) -> None:
        """Let others find every block of `seq` that is full and computed."""
        if not self._is_caching:
            return
        for index in range(seq.num_sealed, seq.num_computed // self._block_size):
            link = seq.link(index, self._block_size)
            for pool, table in zip(self._pools, seq.tables, strict=True):
                pool.seal(table[index], link)
            seq.num_sealed = index + 1

    def max_hit(self, seq: Sequence) -> int:
        """Blocks that `seq` may share at most: at least its last token is computed, in a block of its own.

        A request for prompt logprobs shares none, as it needs the logits of every position.
        """
        if not self._is_caching or seq.is_scoring:
            return 0
        return (len(seq.tokens) - 1) // self._block_size

    def has_sealed(self, seq: Sequence, index: int) -> bool:
        """Whether block `index` of what `seq` knows can be shared in every group."""
        link = seq.link(index, self._block_size)
        return all(pool.match(link) != NO_BLOCK for pool in self._pools)

    def longest_hit(self, seq: Sequence) -> int:
        """Blocks of the longest prefix of which every group still has what the next position reads."""
        longest = 0
        runs = [0] * len(self._window_groups)  # sealed blocks in a row, up to the one looked at
        for index in range(self.max_hit(seq)):
            link = seq.link(index, self._block_size)
            for pool in self._full_pools:
                if pool.match(link) == NO_BLOCK:
                    return longest
            end, has_all = index + 1, True
            for i, g in enumerate(self._window_groups):
                runs[i] = 0 if self._pools[g].match(link) == NO_BLOCK else runs[i] + 1
                has_all &= runs[i] >= end - self._first_kept(g, end * self._block_size)
            if has_all:
                longest = end
        return longest

    def share(self, seq: Sequence, num_hit: int) -> None:
        """Start `seq`, which holds nothing, behind a prefix of `num_hit` blocks that are sealed."""
        seq.num_slots = seq.num_computed = num_hit * self._block_size
        seq.num_sealed = num_hit
        for g, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            first = self._first_kept(g, seq.num_computed)
            seq.num_dropped[g] = first
            table.extend([NO_BLOCK] * first)
            for index in range(first, num_hit):
                block = pool.match(seq.link(index, self._block_size))
                pool.share(block)
                table.append(block)

    def is_led(self, seq: Sequence, leaders: SequenceOf[Sequence]) -> bool:
        """Whether one of `leaders`, who are in the plan that is made, is going to seal a block that `seq` lacks.

        Who is not led, or not yet, has the links that it shares with a leader from that one: a prefix is hashed once.
        """
        block_size = self._block_size
        max_hit = self.max_hit(seq)
        for leader in leaders:
            index = leader.num_computed // block_size  # what it seals next
            if (
                seq.adopt_links(leader, min(index, max_hit), block_size)
                and index < min(max_hit, leader.num_prompt // block_size)
                and seq.link(index, block_size).digest == leader.link(index, block_size).digest
                and not self.has_sealed(seq, index)
            ):
                return True
        return False

    def has_room(self, seq: Sequence, num_hit: int, num_kept: int, prefills: SequenceOf[Sequence]) -> bool:
        """Whether all that `seq` knows fits behind a prefix of `num_hit` shared blocks, when `num_kept` are left free
        and `prefills` have taken all that they lack.

        Of a window group's blocks a span is needed at a time. Shared ones that nobody uses are free, and would not be.
        """
        num_blocks = -(-len(seq.tokens) // self._block_size)
        for g, pool in enumerate(self._pools):
            first = self._first_kept(g, num_hit * self._block_size)
            hit = [pool.match(seq.link(index, self._block_size)) for index in range(first, num_hit)]
            num_new = min(num_blocks - num_hit, self._spans[g] - len(hit))
            num_owed = sum([self._num_owed(other, g) for other in prefills])
            if sum(map(pool.is_free, hit)) + num_new + num_owed + num_kept > pool.num_free:
                return False
        return True

    def _num_owed(self, seq: Sequence, g: int) -> int:
        """Blocks of group `g` that `seq`, which runs, has still to take at once to compute all that it knows."""
        num_live = len(seq.tables[g]) - seq.num_dropped[g]
        return max(0, min(self._num_lacking(seq, len(seq.tokens)), self._spans[g] - num_live))

    # Invariants -----------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Sequence]) -> None:
        """Raise InvariantError unless `holders`, who are all that hold blocks, account for every reference."""
        counts = [[0] * pool.num_blocks for pool in self._pools]
        for seq in holders:
            self._check_tables(seq)
            for count, table in zip(counts, seq.tables, strict=True):
                for block in table:
                    if block != NO_BLOCK:
                        count[block] += 1
        for pool, count in zip(self._pools, counts, strict=True):
            pool.check()
            if any(pool.ref_count(block) != expected for block, expected in enumerate(count)):
                raise InvariantError("the reference counts and the block tables disagree")

    def _check_tables(self, seq: Sequence) -> None:
        first_written = seq.num_computed // self._block_size
        for g, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            if len(table) * self._block_size != seq.num_slots or seq.num_computed + seq.num_in_flight > seq.num_slots:
                raise InvariantError(f"request {seq.request.id} has a table of the wrong length")
            if [block == NO_BLOCK for block in table] != [j < seq.num_dropped[g] for j in range(len(table))]:
                raise InvariantError(f"request {seq.request.id} has lost a block in the middle of its table")
            if seq.num_dropped[g] > self._first_kept(g, seq.num_computed):
                raise InvariantError(f"request {seq.request.id} has dropped a block that it still reads")
            if any(pool.ref_count(block) != 1 or pool.is_sealed(block) for block in table[first_written:]):
                raise InvariantError(f"request {seq.request.id} would write a block that is shared or sealed")
