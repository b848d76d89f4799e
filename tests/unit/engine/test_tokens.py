"""The tokenizer against transformers', and the detokenizer against the whole text, however it falls into tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from engine.modelcache import WeightsError
from engine.tokens import Detokenizer, Tokenizer
from engine.types import PromptTooLong, SamplingParams
from tests.fixtures.model import make_tiny_tokenizer

TEXTS = (
    "Hello, world!",
    "  two spaces, a tab\t and\n\nnewlines ",
    "naïve café — “quotes” … €",
    "東京とМосква و القاهرة",
    "👍🏽 family 👩‍👩‍👧 flags 🇩🇪 and combining e\u0301 a\u0308",
    "special <|im_end|> tokens <|endoftext|> inside",
    "",
)
PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer: Path) -> Tokenizer:
    return Tokenizer(tiny_tokenizer)


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in the manner of Llama 2: pieces with U+2581 for spaces, bytes as <0xE2>."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlorw",
        "▁h",
        "ll",
        "▁hell",
    ]
    backend = Backend(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("l", "l")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def stream(tokenizer: Tokenizer, ids: list[int], params: SamplingParams = PARAMS) -> tuple[str, str | None]:
    """All text that the detokenizer gives for these ids, and the stop string that ended it."""
    detokenizer = Detokenizer(tokenizer, params)
    text = ""
    for token in ids:
        piece, matched = detokenizer.push(token)
        text += piece
        if matched is not None:
            assert detokenizer.flush() == ""
            return text, matched
    return text + detokenizer.flush(), None


# ---- against transformers ----


@pytest.fixture(scope="module")
def pair(default_model: Path) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    return Tokenizer(default_model), AutoTokenizer.from_pretrained(default_model)


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_equal_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 < 2 & 'quotes' \"double\"\n"}],
    [
        {"role": "user", "content": "東京"},
        {"role": "assistant", "content": "👍", "name": None},
        {"role": "user", "content": "<|im_end|>\n<|im_start|>system\n"},
    ],
)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
def test_chat_equals_transformers(pair: tuple[Tokenizer, Any], messages: list[dict[str, Any]], generate: bool) -> None:
    ours, theirs = pair
    expected = theirs.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    assert ours.apply_chat(messages, add_generation_prompt=generate) == expected


TEMPLATES = (
    "{%- for m in messages -%}\n    {%- if loop.index > 3 -%}{%- break -%}{%- endif -%}\n"
    "    {{ m.role + ': ' + m.content | trim }}\n{%- endfor -%}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n  {% endfor %}",
    "{{ bos_token }}{{ messages | tojson }}{{ {'b': 1, 'a': '<&>é'} | tojson(indent=2) }}{{ tools | tojson }}"
    "{% if thinking is defined and thinking %}think{% endif %}{{ eos_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
    "{{ ns.n }}{{ dict(a=1) | tojson }}{{ strftime_now('%Y') }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    make_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": role, "content": f" text {role} é\n"} for role in ("system", "user", "assistant", "user")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for variables in ({}, {"thinking": True}):
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
        )
        assert Tokenizer(tmp_path).render_chat(messages, tools=tools, **variables) == expected


def test_a_sentencepiece_tokenizer_equals_transformers(sentencepiece_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = Tokenizer(sentencepiece_folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(sentencepiece_folder)
    for text in ("hello world", " hello", "東 hell", "a</s>b"):
        ids = ours.encode(text)
        assert ids[0] == 1  # <s>
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert stream(ours, ids)[0] == " " + ours.decode(ids)  # a stream goes on from a prompt: the space counts


# ---- the gateway's side ----


def test_importing_and_using_it_brings_in_neither_torch_nor_transformers(tiny_tokenizer: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.tokens import Tokenizer; "
        f"Tokenizer(Path({str(tiny_tokenizer)!r})).apply_chat([{{'role': 'user', 'content': 'x'}}]); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(tiny.encode("the dog " * 4, max_tokens=40)) <= 40
    with pytest.raises(PromptTooLong):
        tiny.encode("zq" * 30, max_tokens=40)  # tokenized, then found too long
    monkeypatch.setattr(tiny, "_backend", None)  # from here tokenizing anything would fail
    with pytest.raises(PromptTooLong):
        tiny.encode("x" * 1_000_000, max_tokens=40)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "cannot render"),
        ([{"role": "user", "content": 3}], "cannot render"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text parts"),
    ],
)
def test_messages_that_cannot_be_rendered_are_value_errors(
    tiny: Tokenizer, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        tiny.apply_chat(messages)


def test_a_template_may_refuse_and_may_not_reach_out(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    for template, reason in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "cannot render"),
        ("{% for", "cannot render"),
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(ValueError, match=reason):
            Tokenizer(tmp_path).render_chat([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "x"}])


def test_text_parts_are_joined(tiny: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tiny.render_chat([{"role": "user", "content": parts}]) == tiny.render_chat(
        [{"role": "user", "content": "one\ntwo"}]
    )


def test_lone_surrogates_and_unknown_ids(tiny: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tiny.encode("bad \ud800")
    assert tiny.decode([10**6, -1, 2**40]) == ""


def test_end_tokens_come_from_the_model_and_the_tokenizer(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "vocab_size": 600}))
    assert Tokenizer(tmp_path).eos_token_ids == (0, 2)
    assert Tokenizer(tmp_path).vocab_size == 600
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Tokenizer(tmp_path).eos_token_ids == (1, 2)


def test_a_token_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="does not know"):
        tokenizer.encode("the dog")


def test_damaged_files_are_weights_errors(tmp_path: Path) -> None:
    with pytest.raises(WeightsError):
        Tokenizer(tmp_path)
    make_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(WeightsError):
        Tokenizer(tmp_path)
    make_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.decoder = decoders.WordPiece()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WeightsError, match="WordPiece"):
        Tokenizer(tmp_path)


# ---- the detokenizer ----


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_joins_to_the_whole_text(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert stream(tiny, ids)[0] == tiny.decode(ids)
    seen = SamplingParams(skip_special_tokens=False)
    assert stream(tiny, ids, seen)[0] == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=60))
def test_any_ids_join_to_what_the_library_decodes(tiny: Tokenizer, ids: list[int]) -> None:
    backend = tiny._backend
    assert stream(tiny, ids)[0] == tiny.decode(ids) == backend.decode(ids, skip_special_tokens=True)
    shown = SamplingParams(skip_special_tokens=False)
    assert stream(tiny, ids, shown)[0] == backend.decode(ids, skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_streams_without_half_characters(tiny: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tiny, SamplingParams(skip_special_tokens=False))
    pieces = [detokenizer.push(token)[0] for token in tiny.encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_every_token_of_the_default_model_decodes_as_in_the_library(default_model: Path) -> None:
    tokenizer = Tokenizer(default_model)
    backend = tokenizer._backend
    for token in range(tokenizer.vocab_size):
        assert tokenizer.piece(token) == backend.decode([token], skip_special_tokens=False)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The single-byte tokens for these bytes."""
    of_byte = {tokenizer.token_bytes(token): token for token in range(3, 3 + 256)}
    return [of_byte[bytes([byte])] for byte in data]


def test_a_character_waits_for_its_last_byte(tiny: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny, PARAMS)
    assert [detokenizer.push(token)[0] for token in byte_ids(tiny, "é👍".encode())] == ["", "é", "", "", "", "👍"]
    cut = Detokenizer(tiny, PARAMS)
    assert [cut.push(token)[0] for token in byte_ids(tiny, "👍".encode()[:3])] == ["", "", ""]
    assert cut.flush() == "\ufffd"


def test_endless_garbage_is_sent_as_it_comes(tiny: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny, PARAMS)
    (token,) = byte_ids(tiny, b"\x80")
    assert [detokenizer.push(token)[0] for _ in range(1000)] == ["\ufffd"] * 1000


def splits(text: str) -> list[list[str]]:
    """The text in one piece, in characters, and cut once at every position."""
    return [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]


class Pieces:
    """A tokenizer whose token i is the i-th of these texts."""

    _special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


def run_pieces(pieces: list[str], params: SamplingParams) -> tuple[str, str | None]:
    return stream(Pieces(pieces), list(range(len(pieces))), params)  # type: ignore[arg-type]  # all it needs


@pytest.mark.parametrize(
    ("text", "stop", "kept", "matched"),
    [
        ("hello STOP world", ("STOP",), "hello ", "STOP"),
        ("hello STO world", ("STOP",), "hello STO world", None),
        ("ends with STO", ("STOP",), "ends with STO", None),
        ("aaab", ("aab",), "a", "aab"),
        ("abababac", ("ababac",), "ab", "ababac"),
        ("xabcx", ("abc", "b"), "xa", "b"),  # what is complete first ends it
        ("xabcx", ("c", "abc", "bc"), "x", "abc"),  # complete at once: the longest
        ("日本語\n\nテスト", ("\n\n",), "日本語", "\n\n"),
        ("STOP", ("STOP",), "", "STOP"),
        ("a👍b", ("👍",), "a", "👍"),
        ("abcab", ("abcabd", "cab"), "ab", "cab"),
    ],
)
def test_stop_strings_wherever_the_text_is_cut(
    text: str, stop: tuple[str, ...], kept: str, matched: str | None
) -> None:
    for pieces in splits(text):
        assert run_pieces(pieces, SamplingParams(stop=stop)) == (kept, matched)
        with_it = SamplingParams(stop=stop, include_stop_str_in_output=True)
        assert run_pieces(pieces, with_it) == (kept + (matched or ""), matched)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_strings_against_a_plain_search(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    expected: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        ending = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if ending:
            longest = max(ending, key=len)
            expected = (text[: end - len(longest)], longest)
            break
    assert run_pieces(pieces, SamplingParams(stop=tuple(stop))) == expected


def test_nothing_that_may_begin_a_stop_string_is_sent() -> None:
    detokenizer = Detokenizer(Pieces(["a", "S", "T", "x"]), SamplingParams(stop=("STOP",)))  # type: ignore[arg-type]
    assert [detokenizer.push(token)[0] for token in range(4)] == ["a", "", "", "STx"]


def test_no_stop_string_ends_the_text_before_min_tokens() -> None:
    params = SamplingParams(stop=("a",), min_tokens=3, max_tokens=8)
    assert run_pieces(["a", "a", "b", "a", "b"], params) == ("aab", "a")
    assert run_pieces(["a", "a", "a"], params) == ("aa", "a")
