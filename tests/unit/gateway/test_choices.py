"""The text of a fault lists what would do, wherever in a body the field lies."""

from __future__ import annotations

import msgspec
import pytest

from gateway.admin.body import body_faults
from gateway.admin.tenants import TenantUpdate
from gateway.choices import with_choices
from gateway.openai.schema import ChatRequest, decode


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            b'{"role": "robot", "content": "x"}',
            "Invalid enum value 'robot'; known are assistant, developer, system, user - at `$.messages[0].role`",
        ),
        (
            b'{"role": "user", "content": [{"type": "image", "text": "x"}]}',
            "Invalid enum value 'image'; known are text - at `$.messages[0].content[0].type`",
        ),
    ],
)
def test_a_chat(message: bytes, told: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(ChatRequest, b'{"messages": [' + message + b"]}")
    assert str(caught.value) == told


def test_an_admin_body() -> None:
    faults = body_faults(b'{"status": "gone"}', TenantUpdate)
    assert faults == [("status", "invalid enum value 'gone'; known are active, suspended")]


@pytest.mark.parametrize(
    "text", ["Expected `int`, got `str` - at `$.n`", "Object contains unknown field `Invalid enum value`"]
)
def test_another_fault_stays_as_it_is(text: str) -> None:
    assert with_choices(text, ChatRequest) == text


def test_a_value_that_looks_like_a_path_changes_nothing_else() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(ChatRequest, b'{"messages": [{"role": "x` - at `$.n`", "content": "x"}]}')
    assert str(caught.value).endswith("- at `$.messages[0].role`")
