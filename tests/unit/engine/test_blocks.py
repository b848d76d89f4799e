import pytest

from engine.blocks import BlockPool, IntegrityError, OutOfBlocks, block_key, cache_root


def publish(pool: BlockPool, block: int, root: bytes, tokens: list[int]) -> bytes:
    key = block_key(root, tokens)
    pool.publish(block, key, root, tokens)
    return key


def test_roots_tell_apart_what_joins_to_the_same_text() -> None:
    identities = [
        ("ab", "", "c"),
        ("a", "", "bc"),
        ("abc", "", ""),
        ("", "abc", ""),
        ("", "", "abc"),
        ("a", "b", "c"),
        ("t", "x", ""),
        ("t", "", "x"),
    ]
    assert len({cache_root(*identity) for identity in identities}) == len(identities)


def test_a_public_salt_is_nobodys_and_no_tenants() -> None:
    public = cache_root("a", "d", "s", public=True)
    assert public == cache_root("b", "d", "s", public=True)
    tenants = [("a", "d", "s"), ("", "d", "s"), ("public", "d", "s"), ("d", "s", ""), ("public", "", "ds")]
    assert public not in {cache_root(*identity) for identity in tenants}
    others = [("a", "e", "s"), ("a", "d", "t"), ("a", "ds", ""), ("a", "", "ds")]
    assert public not in {cache_root(*identity, public=True) for identity in others}


def test_a_key_depends_on_the_parent_and_on_the_border_between_tokens() -> None:
    root, other = cache_root("a", "", ""), cache_root("b", "", "")
    assert block_key(root, [1, 2]) != block_key(other, [1, 2])
    assert block_key(root, [1, 2]) != block_key(root, [2, 1])
    assert block_key(root, [256, 0]) != block_key(root, [0, 256])


def test_a_published_block_is_found_after_its_release_until_it_is_needed() -> None:
    pool = BlockPool(2, 2)
    root = cache_root("t", "", "")
    [block] = pool.allocate(1)
    key = publish(pool, block, root, [1, 2])
    pool.release([block])
    assert pool.find(key, root, [1, 2]) == block
    assert pool.num_free == 2
    pool.allocate(2)
    assert pool.find(key, root, [1, 2]) is None


def test_an_unpublished_block_is_not_found() -> None:
    pool = BlockPool(2, 2)
    root = cache_root("t", "", "")
    pool.allocate(1)
    assert pool.find(block_key(root, [1, 2]), root, [1, 2]) is None


def test_a_colliding_key_is_a_miss() -> None:
    pool = BlockPool(2, 2)
    root = cache_root("t", "", "")
    [block] = pool.allocate(1)
    key = publish(pool, block, root, [1, 2])
    assert pool.find(key, root, [1, 3]) is None
    assert pool.find(key, cache_root("u", "", ""), [1, 2]) is None


def test_blocks_without_content_go_first_then_the_longest_unused_and_ends_before_starts() -> None:
    pool = BlockPool(4, 1)
    root = cache_root("t", "", "")
    old, young = pool.allocate(2), pool.allocate(2)
    keys = [publish(pool, block, root, [block]) for block in (*old, young[0])]
    pool.release(old)
    pool.release(young)
    assert pool.allocate(1) == [young[1]]
    assert pool.allocate(1) == [old[1]]
    assert pool.find(keys[0], root, [old[0]]) == old[0]
    assert pool.allocate(2) == [old[0], young[0]]


def test_the_first_of_two_blocks_with_one_content_stays() -> None:
    pool = BlockPool(2, 1)
    root = cache_root("t", "", "")
    first, second = pool.allocate(2)
    key = publish(pool, first, root, [7])
    publish(pool, second, root, [7])
    assert pool.find(key, root, [7]) == first
    pool.release([second])
    assert pool.find(key, root, [7]) == first
    pool.check_integrity([[first]])


def test_shared_blocks_are_free_when_the_last_user_lets_go() -> None:
    pool = BlockPool(2, 1)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    with pytest.raises(IntegrityError):
        pool.release([block])


def test_more_than_is_free_is_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(3, 1)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.num_free == 1


def test_integrity_sees_a_lost_and_a_foreign_block() -> None:
    pool = BlockPool(3, 1)
    [block] = pool.allocate(1)
    pool.check_integrity([[block]])
    with pytest.raises(IntegrityError):
        pool.check_integrity([])
    with pytest.raises(IntegrityError):
        pool.check_integrity([[block], [block]])
    with pytest.raises(IntegrityError):
        pool.check_integrity([[block], [2]])


def test_a_check_comes_in_slices_that_look_at_every_block() -> None:
    for wrong in range(5):
        pool = BlockPool(5, 1)
        assert len(list(pool.checked_slices([], 2))) == 3
        pool.share([wrong])
        slices = pool.checked_slices([], 2)
        for _ in range(wrong // 2):
            next(slices)
        with pytest.raises(IntegrityError):
            next(slices)


def test_a_block_is_sole_while_one_table_has_it() -> None:
    pool = BlockPool(2, 1)
    [block] = pool.allocate(1)
    assert pool.is_sole(block)
    pool.share([block])
    assert not pool.is_sole(block)
