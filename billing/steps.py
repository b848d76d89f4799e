"""The steps of a dunning, as people write them: `notice@3,notice@7,suspend@14`, or `none`.

Pure. Does not know: what begins a dunning and what ends it (`billing/dunning.py`).
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

STEPS_MAX = 20
DAYS_MAX = 365
NONE = "none"
_STEP = re.compile(r"(notice|suspend)@(\d{1,3})", re.ASCII)


class StepKind(StrEnum):
    """What a step does: both are events and alerts, the last may also close the door."""

    NOTICE = "notice"
    SUSPEND = "suspend"


class Step(msgspec.Struct, frozen=True):
    """So many whole days after the dunning began."""

    day: int
    kind: StepKind


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The house's rule for tenants that have none of their own; no steps: no dunning.

    `ends_uncollectible`: what the house has given up as uncollectible is dunned no more and holds nobody suspended.
    """

    steps: tuple[Step, ...] = ()
    ends_uncollectible: bool = False


NO_DUNNING = Policy()


def parse_steps(text: str) -> tuple[Step, ...]:
    """The text → steps. Raises `ValueError` with what it must be."""
    if text == NONE:
        return ()
    steps = []
    for part in text.split(","):
        found = _STEP.fullmatch(part.strip())
        if found is None:
            raise ValueError("must be none, or steps such as notice@3,notice@7,suspend@14: what, after how many days")
        steps.append(Step(int(found[2]), StepKind(found[1])))
    days = [step.day for step in steps]
    if days != sorted(set(days)):
        raise ValueError("must have rising days")
    if days and days[-1] > DAYS_MAX:
        raise ValueError(f"must end within {DAYS_MAX} days")
    if len(steps) > STEPS_MAX:
        raise ValueError(f"must be at most {STEPS_MAX} steps")
    if any(step.kind is StepKind.SUSPEND for step in steps[:-1]):
        raise ValueError("must have at most one suspend, as the last step")
    return tuple(steps)
