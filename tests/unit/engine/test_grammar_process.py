"""Guided requests in the engine's own process, on the tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.process import EngineProcess
from engine.types import EngineConfig, EngineError, Finish, Guide, Request, SamplingParams, Update

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 60.0
ENDLESS = Guide("json_schema", json.dumps({"type": "integer", "multipleOf": 99999989}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    config = EngineConfig(model=str(tiny_model), device="cpu", dtype="float32", threads=1, kv_cache_bytes=4 << 20)
    made = EngineProcess(config)
    await made.start()
    yield made
    await made.stop()


def ask(name: str, guide: Guide | None, **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": 40, "guided": guide, "seed": 1} | sampling)
    return Request(id=name, prompt=[5, 6, 7], sampling=params)


async def answer(engine: EngineProcess, request: Request) -> list[Update]:
    async with asyncio.timeout(WAIT_S):
        return [update async for update in engine.submit(request)]


def text(updates: list[Update]) -> str:
    return "".join(delta.text for update in updates for delta in update.deltas)


async def test_many_guides_and_free_ones_at_once(engine: EngineProcess) -> None:
    patterns = ["[a-f]{6}", r"\d{3}-\d{2}", "(yes|no)", "x[^x]{1,4}x"] * 3
    requests = [ask(f"r{number}", Guide("regex", pattern)) for number, pattern in enumerate(patterns)]
    free = [ask(f"f{number}", None, ignore_eos=True) for number in range(4)]
    answers = await asyncio.gather(*(answer(engine, one) for one in requests + free))
    for pattern, updates in zip(patterns, answers, strict=False):
        assert updates[-1].finish is Finish.STOP
        assert re.fullmatch(pattern, text(updates)), (pattern, text(updates))
    assert all(updates[-1].finish is Finish.LENGTH for updates in answers[len(patterns) :])


async def test_a_grammar_that_is_none_is_told_to_its_request_alone(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match="guided: kind must be"):
        engine.submit(ask("r", Guide("yaml", "x")))
    bad, good = await asyncio.gather(
        answer(engine, ask("bad", Guide("regex", "(a"))), answer(engine, ask("good", Guide("choice", ("yes", "no"))))
    )
    assert (bad[-1].finish, bad[-1].rejected) == (Finish.ERROR, True)
    assert "unclosed group" in (bad[-1].error or "")
    assert text(good) in ("yes", "no")


async def test_streams_go_on_and_an_abort_is_heard_while_a_grammar_is_compiled(engine: EngineProcess) -> None:
    hostile = engine.submit(ask("hostile", ENDLESS))
    free = await answer(engine, ask("free", None, ignore_eos=True))
    assert free[-1].counts.completion == 40
    engine.abort("hostile")
    async with asyncio.timeout(WAIT_S):
        [last] = [update async for update in hostile]
    assert (last.finish, last.counts.completion) == (Finish.ABORT, 0)
    after = await answer(engine, ask("after", Guide("choice", ("yes", "no"))))
    assert text(after) in ("yes", "no")
    refused = await answer(engine, ask("again", ENDLESS))  # it is known by now
    limits = ("the grammar takes too long to compile", "the grammar is too large or nested too deeply")
    assert refused[-1].error in limits  # which one it meets first is a matter of how fast the machine is


async def test_the_process_that_tries_grammars_ends_with_the_engine(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), device="cpu", dtype="float32", threads=1, kv_cache_bytes=4 << 20)
    engine = EngineProcess(config)
    await engine.start()
    try:
        await answer(engine, ask("r", Guide("regex", "a")))
        [trial] = _children(engine.pid)
        os.kill(engine.pid or 0, 9)
        until_s = time.monotonic() + WAIT_S
        while _runs(trial):
            assert time.monotonic() < until_s
            await asyncio.sleep(0.01)
    finally:
        await engine.stop()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children(pid: int | None) -> list[int]:
    """The processes that a process has started."""
    stats = (file.read_text().rsplit(")", 1) for file in Path("/proc").glob("[0-9]*/stat"))
    return [int(name.split()[0]) for name, rest in stats if int(rest.split()[1]) == pid]
