"""What other rooms' tests lean on in the fake engine beyond the contract: that its words can be known beforehand."""

from collections.abc import AsyncIterator

import pytest

from engine.fake import FakeEngine, FakeTokenizer
from engine.types import Finish, Request, SamplingParams, Update


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    await engine.start()
    yield engine
    await engine.stop()


def ask(text: str = "hello ", id_: str = "r", n: int = 1, **sampling: object) -> Request:
    return Request(
        id=id_, prompt=FakeTokenizer().encode(text), n=n, sampling=SamplingParams(**{"max_tokens": 9} | sampling)
    )


async def read(engine: FakeEngine, request: Request) -> tuple[list[str], Update]:
    texts = [""] * request.n
    async for update in engine.submit(request):
        for delta in update.deltas:
            texts[delta.index] += delta.text
    return texts, update


async def test_a_choice_repeats_the_prompt_from_the_token_of_its_number(fake: FakeEngine) -> None:
    texts, last = await read(fake, ask(n=2))
    assert texts == ["hello hel", "ello hell"]
    assert (last.finish, last.counts.completion) == (Finish.LENGTH, 18)
    assert [request.id for request in fake.submitted] == ["r"]


async def test_stop_strings_and_tokens_are_honoured(fake: FakeEngine) -> None:
    texts, last = await read(fake, ask(stop=("o h",)))
    assert (texts, last.deltas[0].stop_reason, last.counts.completion) == (["hell"], "o h", 7)
    texts, last = await read(fake, ask(stop_token_ids=(ord("o"),)))
    assert (texts, last.deltas[0].stop_reason, last.counts.completion) == (["hell"], ord("o"), 5)


async def test_characters_of_many_bytes_arrive_whole(fake: FakeEngine) -> None:
    pieces = [delta.text async for update in fake.submit(ask("né", max_tokens=5)) for delta in update.deltas]
    assert pieces == ["n", "", "é", "n", "\ufffd"]


async def test_it_ends_by_itself_when_told_to() -> None:
    engine = FakeEngine(eos_after=4)
    await engine.start()
    texts, last = await read(engine, ask())
    assert (texts, last.finish, last.counts.completion) == (["hell"], Finish.STOP, 5)
    texts, last = await read(engine, ask(id_="s", min_tokens=7))
    assert (texts, last.counts.completion) == (["hello h"], 8)
    texts, last = await read(engine, ask(id_="t", ignore_eos=True))
    assert (texts, last.finish) == (["hello hel"], Finish.LENGTH)
    await engine.stop()


async def test_a_reply_can_be_given() -> None:
    engine = FakeEngine(reply=lambda request, index: list(b"one" if index == 0 else b"two!"))
    await engine.start()
    texts, last = await read(engine, ask(n=2, logprobs=2))
    assert texts == ["one", "two!"]
    assert last.finish is Finish.STOP
    assert len(last.deltas[0].logprobs[0].top) == 2
    await engine.stop()


async def test_its_tokenizer_speaks_bytes_and_chats() -> None:
    tokenizer = FakeTokenizer()
    assert tokenizer.decode([*tokenizer.encode("né"), 256]) == "né"
    assert tokenizer.decode(tokenizer.apply_chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant: "
    assert tokenizer.piece(256) == "<end>"
