"""One pool of blocks: who gets which, what is remembered, and in which order it is forgotten."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from headrace.sched.blocks import NO_BLOCK, BlockPool, Link, chain_link, chain_root
from headrace.types import InvariantError

ROOT = chain_root(b"")


def link(*tokens: int, parent: bytes = ROOT) -> Link:
    return chain_link(parent, array("i", tokens))


def sealed(pool: BlockPool, *links: Link) -> list[int]:
    """One block for each of `links`, taken and sealed."""
    blocks = pool.take(len(links))
    for block, content in zip(blocks, links, strict=True):
        pool.seal(block, content)
    return blocks


def test_a_link_names_its_tokens_and_all_that_comes_before_them() -> None:
    first = link(1, 2)
    assert link(1, 2) == first
    assert link(1, 3).digest != first.digest
    assert link(1, 2, parent=first.digest).digest != first.digest


def test_chains_of_different_salts_never_meet() -> None:
    assert chain_root(b"a") != chain_root(b"b")
    # a salt made of what a link hashes is still no link: the two are hashed under different prefixes
    known = link(1, 2)
    assert chain_root(known.parent + known.tokens) != known.digest
    assert chain_root(b"link" + known.parent + known.tokens) != known.digest


def test_a_taken_block_is_nobody_elses_until_it_is_released() -> None:
    pool = BlockPool(3, 2)
    first, second = pool.take(1), pool.take(2)
    assert len({*first, *second}) == 3 and pool.num_free == 0
    pool.release(first)
    assert pool.num_free == 1 and pool.take(1) == first


def test_taking_more_than_is_free_is_refused() -> None:
    pool = BlockPool(2, 2)
    pool.take(1)
    with pytest.raises(InvariantError, match="2 blocks were asked of a pool that has 1 free"):
        pool.take(2)
    assert pool.num_free == 1


def test_a_sealed_block_is_found_by_its_link_also_when_nobody_uses_it() -> None:
    pool = BlockPool(3, 2)
    (block,) = sealed(pool, link(1, 2))
    assert pool.match(link(1, 2)) == block
    assert pool.match(link(1, 3)) == NO_BLOCK
    pool.release([block])
    assert pool.is_free(block) and pool.match(link(1, 2)) == block
    pool.share(block)
    assert not pool.is_free(block) and pool.num_free == 2
    pool.check()


def test_beyond_the_eager_blocks_three_are_forgotten_for_each_that_is_taken_for_the_first_time() -> None:
    pool = BlockPool(20, 2, num_eager=8)

    def taken_after_a_text(token: int) -> int:
        (block,) = sealed(pool, link(token, token))
        pool.release([block])
        return block

    assert [taken_after_a_text(i) for i in range(8)] == list(range(8))
    assert [taken_after_a_text(i) for i in range(8, 16)] == [0, 1, 2, 8, 3, 4, 5, 9]
    pool.check()


def test_a_block_that_holds_nothing_is_taken_before_one_that_was_never_used() -> None:
    pool = BlockPool(4, 2)
    (block,) = pool.take(1)
    pool.release([block])
    assert pool.take(2) == [block, 1]


def test_what_is_used_leaves_the_rest_of_the_pool_whatever_is_eager() -> None:
    pool = BlockPool(4, 2, num_eager=0)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.check()


def test_a_digest_alone_is_not_trusted() -> None:
    pool = BlockPool(2, 2)
    known = link(1, 2)
    sealed(pool, known)
    assert pool.match(known._replace(tokens=link(3, 4).tokens)) == NO_BLOCK
    assert pool.match(known._replace(parent=b"another text")) == NO_BLOCK


def test_a_shared_block_is_free_when_its_last_user_is_gone() -> None:
    pool = BlockPool(1, 2)
    blocks = sealed(pool, link(1, 2))
    pool.share(blocks[0])
    assert pool.ref_count(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_what_was_freed_longest_ago_is_forgotten_first() -> None:
    pool = BlockPool(2, 2)
    old, new = sealed(pool, link(1, 2), link(3, 4))
    pool.release([old])
    pool.release([new])
    assert pool.take(1) == [old]
    assert pool.match(link(1, 2)) == NO_BLOCK and pool.match(link(3, 4)) == new
    pool.check()


def test_the_tail_of_a_sequence_is_forgotten_before_its_prefix() -> None:
    pool = BlockPool(3, 2)
    blocks = sealed(pool, link(1, 1), link(2, 2), link(3, 3))
    pool.release(blocks)
    assert pool.take(3) == blocks[::-1]


def test_use_makes_a_block_young_again() -> None:
    pool = BlockPool(2, 2)
    first, second = sealed(pool, link(1, 2), link(3, 4))
    pool.release([first])
    pool.release([second])
    pool.share(first)
    pool.release([first])
    assert pool.take(1) == [second]


def test_a_block_with_nothing_to_remember_is_taken_before_one_that_is_sealed() -> None:
    pool = BlockPool(2, 2)
    (kept,) = sealed(pool, link(1, 2))
    blank = pool.take(1)
    pool.release([kept])
    pool.release(blank)
    assert pool.take(1) == blank and pool.match(link(1, 2)) == kept


def test_of_two_blocks_with_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(2, 2)
    first, second = sealed(pool, link(1, 2), link(1, 2))
    assert pool.match(link(1, 2)) == first
    assert not pool.is_sealed(second) and pool.num_sealed == 1
    pool.check()


def test_a_block_that_is_not_sealed_cannot_be_shared() -> None:
    pool = BlockPool(1, 2)
    with pytest.raises(InvariantError, match="not sealed"):
        pool.share(pool.take(1)[0])


def test_only_a_full_block_in_use_can_be_sealed_and_only_once() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(InvariantError, match="free or sealed"):
        pool.seal(0, link(1, 2))
    (block,) = sealed(pool, link(1, 2))
    with pytest.raises(InvariantError, match="free or sealed"):
        pool.seal(block, link(3, 4))
    with pytest.raises(InvariantError, match="not full"):
        pool.seal(pool.take(1)[0], link(1))


def test_releasing_a_free_block_is_refused() -> None:
    pool = BlockPool(1, 2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(InvariantError, match="free already"):
        pool.release(blocks)


def _lose_a_reference(pool: BlockPool) -> None:
    pool._ref_count[0] = -1


def _lose_a_free_block(pool: BlockPool) -> None:
    pool._num_taken += 1


def _lose_an_index_entry(pool: BlockPool) -> None:
    pool._sealed.clear()


@pytest.mark.parametrize("damage", [_lose_a_reference, _lose_a_free_block, _lose_an_index_entry])
def test_check_finds_damage(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(2, 2)
    sealed(pool, link(1, 2))
    pool.check()
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check()
