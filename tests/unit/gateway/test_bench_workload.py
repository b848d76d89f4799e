"""What the benchmark asks: lengths to the token, seeds, shares, datasets."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.tokens import Tokenizer
from gateway.bench import sharegpt
from gateway.bench.filler import Filler, FillError
from gateway.bench.lengths import Lengths
from gateway.bench.sharegpt import DatasetError, Exchange
from gateway.bench.workload import Bodies, Prompt, ShareGpt, Synthetic
from tests.fixtures.server import ByteTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Tokenizer:
    (tiny_tokenizer / "config.json").write_text('{"vocab_size": 512, "eos_token_id": 2}')
    return Tokenizer(tiny_tokenizer)


def test_lengths() -> None:
    rng = random.Random(0)
    assert Lengths.parse("128").pick(7, rng) == 128
    walked = Lengths.parse("30, 200,800")
    assert [walked.pick(index, rng) for index in range(4)] == [30, 200, 800, 30]
    drawn = {Lengths.parse("5-8").pick(index, rng) for index in range(200)}
    assert drawn == {5, 6, 7, 8}
    for wrong in ("", "x", "0", "8-5", "1,,2", "-3", "1.5"):
        with pytest.raises(ValueError, match="token"):
            Lengths.parse(wrong)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("which", ["bpe", "bytes"])
def test_a_prompt_has_exactly_the_tokens_that_were_asked_for(which: str, chat: bool, tokenizer: Tokenizer) -> None:
    used: Any = tokenizer if which == "bpe" else ByteTokenizer()
    for prefix in (0, 90):
        prompts = Synthetic(
            input_len=Lengths.parse("150-400"),
            output_len=Lengths.parse("5-9"),
            prefix=prefix,
            chat=chat,
            tokenizer=used,
            seed=3,
        )
        asked = [prompts.prompt(index, "abc") for index in range(20)]
        lengths = [len(used.apply_chat(prompt.messages)) if chat else len(used.encode(prompt.text)) for prompt in asked]
        assert all(150 <= length <= 400 for length in lengths)
        # The same numbers come out whichever way the tokens are counted: they were drawn, not found.
        drawn = [Lengths.parse("150-400").pick(i, random.Random(f"3 {i}")) for i in range(20)]
        assert lengths == drawn
        assert all(5 <= prompt.max_tokens <= 9 for prompt in asked)
        assert len({prompt.user for prompt in asked}) == 20
        assert {prompt.system for prompt in asked} == {asked[0].system}
        assert len(used.encode(asked[0].system)) == prefix


def test_without_a_tokenizer_a_word_is_a_token() -> None:
    prompts = Synthetic(input_len=Lengths.parse("40"), output_len=Lengths.parse("5"), prefix=30)
    prompt = prompts.prompt(0, "n")
    assert not prompts.exact
    assert (len(prompt.system.split()), len(prompt.user.split())) == (30, 10)
    assert prompt.user.startswith("[n-0] ")


def test_lengths_and_order_are_the_seeds_and_words_the_nonces() -> None:
    def asked(seed: int, nonce: str) -> list[Prompt]:
        prompts = Synthetic(
            input_len=Lengths.parse("10-90"), output_len=Lengths.parse("1-99"), prefix=5, chat=False, seed=seed
        )
        return [prompts.prompt(index, nonce) for index in range(10)]

    first, again, fresh, other = asked(1, "a"), asked(1, "a"), asked(1, "b"), asked(2, "a")
    assert first == again
    assert [p.max_tokens for p in first] == [p.max_tokens for p in fresh]
    assert [len(p.user.split()) for p in first] == [len(p.user.split()) for p in fresh]
    assert not {p.user for p in first} & {p.user for p in fresh}
    assert {p.system for p in first} == {p.system for p in fresh}
    assert [p.max_tokens for p in first] != [p.max_tokens for p in other]
    assert "[" not in asked(1, "")[0].user


def test_a_length_that_cannot_be_had_is_told(tokenizer: Tokenizer) -> None:
    prompts = Synthetic(input_len=Lengths.parse("3"), output_len=Lengths.parse("1"), tokenizer=tokenizer)
    with pytest.raises(FillError, match="3 tokens is too short: the least"):
        prompts.prompt(0, "")

    with pytest.raises(FillError, match="exactly 11"):  # no text has an odd number of these tokens
        Filler(tokenizer).text(11, random.Random(0), count=lambda text: 2 * len(text.split()))


# --- bodies --------------------------------------------------------------------------------------

PROMPT = Prompt("be brief", "hello", 9)


def body(bodies: Bodies, index: int = 0) -> dict[str, Any]:
    return dict(msgspec.json.decode(bodies.body(PROMPT, index)[1]))


def test_the_body_of_each_endpoint() -> None:
    assert body(Bodies(models=["m"])) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.0,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    }
    plain = body(Bodies(models=["m"], endpoint="completions", ignore_eos=True, extra={"top_k": 1, "stream": False}))
    assert plain["prompt"] == "be brief\n\nhello"
    assert "messages" not in plain
    assert (plain["ignore_eos"], plain["min_tokens"], plain["top_k"], plain["stream"]) == (True, 9, 1, False)


def test_models_and_bodies_are_walked_in_turn() -> None:
    bodies = Bodies(models=["a", "b", "c"], extras=[{"lora": 0}, {"lora": 1}])
    assert [bodies.body(PROMPT, index)[0] for index in range(4)] == ["a", "b", "c", "a"]
    assert [body(bodies, index)["lora"] for index in range(4)] == [0, 1, 0, 1]


def test_zipf_asks_for_the_first_most() -> None:
    bodies = Bodies(models=[str(number) for number in range(8)], zipf=1.0, seed=4)
    asked = Counter(bodies.body(PROMPT, index)[0] for index in range(4000))
    harmonic = sum(1 / rank for rank in range(1, 9))
    for rank in range(1, 9):
        assert asked[str(rank - 1)] / 4000 == pytest.approx(1 / rank / harmonic, rel=0.25)
    assert bodies.body(PROMPT, 5) == bodies.body(PROMPT, 5)
    pairs = Bodies(models=["a"], extras=[{"lora": 0}, {"lora": 1}], zipf=0.5)
    assert {body(pairs, index)["lora"] for index in range(50)} == {0, 1}


# --- a dataset -----------------------------------------------------------------------------------


def write(path: Path, what: Any) -> Path:
    path.write_text(what if isinstance(what, str) else json.dumps(what))
    return path


def turns(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[n % 2], "value": value} for n, value in enumerate(values)]


def test_a_dataset_gives_questions_with_their_answers_lengths(tmp_path: Path) -> None:
    file = write(
        tmp_path / "sharegpt.json",
        [
            {"id": "1", "conversations": turns("What is a tide and why is it?", "It is the sea rising.", "And then?")},
            {"id": "2", "conversation": turns("Name three rivers of France.", "Loire, Seine, Rhône. " * 3)},
            {"id": "3", "conversations": turns("Only a question, and no answer to it.")},
            {"id": "4", "conversations": turns("", "An answer to nothing at all.")},
            {"id": "5"},
        ],
    )
    exchanges = sharegpt.load(file)
    assert [exchange.question for exchange in exchanges] == [
        "What is a tide and why is it?",
        "Name three rivers of France.",
    ]
    prompts = ShareGpt(exchanges, tokenizer=ByteTokenizer(), seed=0)
    asked = [prompts.prompt(index, "n") for index in range(4)]
    by_question = {exchange.question: len(exchange.answer.encode()) for exchange in exchanges}
    for index, prompt in enumerate(asked):
        nonce, _, question = prompt.user.partition("] ")
        assert nonce == f"[n-{index}"
        assert prompt.max_tokens == by_question[question]
    assert {prompt.user.partition("] ")[2] for prompt in asked[:2]} == set(by_question)
    assert asked[2].user.partition("] ")[2] == asked[0].user.partition("] ")[2]
    fixed = ShareGpt(exchanges, output_len=Lengths.parse("3"), seed=0)
    assert fixed.prompt(0, "").max_tokens == 3
    assert fixed.prompt(0, "").user in by_question


def test_what_is_too_long_or_too_short_is_left_out() -> None:
    exchanges = [Exchange("a" * n, "b" * m) for n, m in ((3, 50), (50, 3), (1025, 50), (50, 1025), (1024, 1024))]
    prompts = ShareGpt(exchanges, tokenizer=ByteTokenizer())
    assert {len(prompts.prompt(index, "").user) for index in range(8)} == {1024}
    with pytest.raises(ValueError, match="no exchange"):
        ShareGpt(exchanges[:4], tokenizer=ByteTokenizer())


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nonsense", "not in ShareGPT's format"),
        ({"conversations": []}, "not in ShareGPT's format"),
        ([{"conversations": [{"from": 1, "value": "x"}]}], "not in ShareGPT's format"),
        ([], "no conversation"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_dataset_is_refused(tmp_path: Path, what: Any, reason: str) -> None:
    path = tmp_path / "file.json"
    if what is not None:
        write(path, what)
    with pytest.raises(DatasetError, match=reason):
        sharegpt.load(path)
