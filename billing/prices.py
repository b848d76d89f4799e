"""The price book."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TokenClass(StrEnum):
    """What is priced apart."""

    PROMPT = "prompt"  # prompt tokens that were computed
    CACHED = "cached"  # prompt tokens reused from the prefix cache
    COMPLETION = "completion"


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one request, in nano-units of currency per million tokens."""

    price_id: str
    currency: str
    prompt: int
    cached: int
    completion: int

    def dearest_prompt(self) -> int:
        """The most a prompt token can cost, cached or not."""
        return max(self.prompt, self.cached)


class PriceVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the price book; never changed, only followed by another."""

    id: str
    tenant: str | None  # None: for all tenants
    model: str  # a model or adapter name, or "*"
    effective_at_us: int
    recorded_us: int  # requests that began earlier do not know it
    rate: Rate
