"""What one step computes, as plain lists: the same for every way to compute it.

Knows: rows. Does not know: tensors, or why a sequence is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Batch:
    """The rows of a step's sequences, those of one sequence side by side, and side by side those of one adapter.

    One entry a sequence in `starts`, `counts`, `tables` and `users`.
    """

    tokens: list[int] = field(default_factory=list)  # one a row
    starts: list[int] = field(default_factory=list)  # the position of its first row
    counts: list[int] = field(default_factory=list)  # its rows
    tables: list[list[int]] = field(default_factory=list)  # its blocks in order, as many as its tokens take
    users: list[str | None] = field(default_factory=list)  # the id of its adapter
    wanted: list[int] = field(default_factory=list)  # rows whose logits are wanted, ascending

    def add(self, tokens: list[int], start: int, table: list[int], adapter_id: str | None) -> None:
        """A sequence whose next rows are `tokens`, the first of them at position `start`."""
        self.tokens += tokens
        self.starts.append(start)
        self.counts.append(len(tokens))
        self.tables.append(table)
        self.users.append(adapter_id)
