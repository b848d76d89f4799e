"""A tenant's long answers: bounded in number, one at a time, whoever leaves."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import ExitStack

import pytest

from gateway.billing.trees import KEPT_LEAVES, Leaves, Trees
from gateway.billing.turns import SEATS, SLICE_BYTES, Turns, begun, slices
from gateway.errors import RateLimited


def test_a_tenant_has_so_many_long_answers_and_no_more() -> None:
    turns = Turns()
    with ExitStack() as taken:
        for _ in range(SEATS):
            taken.enter_context(turns.seat("acme"))
        with pytest.raises(RateLimited) as refused, turns.seat("acme"):
            pass
        assert refused.value.headers["retry-after"] == "1"
        with turns.seat("other"):
            pass
    with turns.seat("acme"):
        pass


async def test_work_that_nobody_waits_for_keeps_its_turn() -> None:
    turns, end, order = Turns(), asyncio.Event(), list[str]()

    async def long() -> None:
        order.append("began")
        await end.wait()
        order.append("ended")

    async def short() -> None:
        order.append("next")

    left = asyncio.ensure_future(turns.take("acme", long))
    following = asyncio.ensure_future(turns.take("acme", short))
    gone = asyncio.ensure_future(turns.take("acme", long))
    await asyncio.sleep(0)
    left.cancel()
    gone.cancel()
    await asyncio.wait({left, gone})
    await turns.take("other", short)
    assert order == ["began", "next"]
    end.set()
    await following
    assert order == ["began", "next", "ended", "next"]


async def test_a_seat_is_given_back_by_an_answer_that_nobody_takes() -> None:
    turns = Turns()

    async def pieces() -> AsyncGenerator[bytes, None]:
        with turns.seat("acme"):
            yield b"1"
            yield b"2"

    assert [piece async for piece in await begun(pieces())] == [b"1", b"2"]
    for _ in range(SEATS):
        never_read = await begun(pieces())
        del never_read
        half_read = await begun(pieces())
        await anext(half_read)
        del half_read
        gc.collect()
        await asyncio.sleep(0.001)
    with ExitStack() as taken:
        for _ in range(SEATS):
            taken.enter_context(turns.seat("acme"))
        with pytest.raises(RateLimited):
            await begun(pieces())


def test_a_tree_is_read_once_and_few_are_kept() -> None:
    trees, reads = Trees(), list[str]()

    def leaves(id: str, count: int) -> Leaves:
        def read() -> Leaves:
            reads.append(id)
            return [(id, b"")] * count

        return trees.leaves(id, read)

    assert leaves("a", 10) is leaves("a", 10)
    leaves("b", KEPT_LEAVES - 10)
    leaves("a", 10)
    leaves("c", 1)
    assert reads == ["a", "b", "c"]
    leaves("a", 10)
    leaves("b", 1)
    leaves("d", KEPT_LEAVES + 1)
    leaves("d", KEPT_LEAVES + 1)
    leaves("a", 10)
    assert reads == ["a", "b", "c", "b", "d", "d"]


def test_slices_are_the_whole() -> None:
    body = bytes(2 * SLICE_BYTES + 1)
    assert [len(piece) for piece in slices(body)] == [SLICE_BYTES, SLICE_BYTES, 1]
    assert list(slices(b"")) == []
