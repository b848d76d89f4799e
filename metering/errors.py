"""What can go wrong between the spool and a consumer of its events.

MeteringError
├── Rejected           the sink will never take (one of) these events as they are
└── StoreError
    ├── StoreUnavailable   not reachable, overloaded or too slow now; what was sent may have been stored
    ├── StoreTooMuch       the answer would be longer, or take more reading, than the asker said
    ├── StoreDamaged       what is stored is not what was inserted
    └── StoreNewer         what is stored was written by a newer version of Meterhouse
"""

from __future__ import annotations


class MeteringError(Exception):
    """Root of the errors of consumers and stores."""


class Rejected(MeteringError):
    """The sink will never take (one of) these events as they are: trying again is useless."""


class StoreError(MeteringError):
    """The usage store did not do what it was asked."""


class StoreUnavailable(StoreError):
    """The store is not reachable, overloaded or too slow now. What was sent may have been stored all the same."""


class StoreTooMuch(StoreError):
    """The answer would be longer, or take more reading, than the asker said. The text is for who asked."""


class StoreDamaged(StoreError):
    """What is stored is not what was inserted: an event's bytes do not have its hash."""


class StoreNewer(StoreError):
    """What is stored was written by a newer version of Meterhouse: read by this one it would not be the same."""
