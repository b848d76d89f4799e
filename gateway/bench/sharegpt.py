"""Questions with the lengths of their answers from a file in ShareGPT's format.

The format: a JSON list of `{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}`. As in
vLLM's benchmark the first question is the prompt, and its answer's length the number of tokens asked for.
Knows: the file. Does not know: tokens.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class DatasetError(ValueError):
    """The file has no conversations; the text says why."""


class _Turn(msgspec.Struct, rename={"speaker": "from"}):
    speaker: str = ""
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] | None = None
    conversation: list[_Turn] | None = None

    @property
    def turns(self) -> list[_Turn]:
        return self.conversations or self.conversation or []


class Exchange(msgspec.Struct, frozen=True):
    """A question and what was answered to it."""

    question: str
    answer: str


_file = msgspec.json.Decoder(list[_Conversation])


def load(path: Path) -> list[Exchange]:
    """Every conversation's first exchange. Raises `DatasetError`."""
    try:
        conversations = _file.decode(path.read_bytes())
    except OSError as error:
        raise DatasetError(f"the dataset cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise DatasetError(f"the dataset is not in ShareGPT's format: {error}") from error
    exchanges = [
        Exchange(conversation.turns[0].value, conversation.turns[1].value)
        for conversation in conversations
        if len(conversation.turns) >= 2 and conversation.turns[0].value.strip() and conversation.turns[1].value.strip()
    ]
    if not exchanges:
        raise DatasetError("the dataset has no conversation with a question and an answer")
    return exchanges
