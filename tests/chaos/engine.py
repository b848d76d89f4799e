"""An engine's process without a model: the deterministic engine behind the messages of `engine.wire`.

Started like the real one, with the descriptor of its socket, and killed like it; it is up in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from engine.client import UpdateStream
from engine.fake import FakeEngine
from engine.types import EngineError, StepOutput
from engine.wire import Abort, Configure, Ready, SetCeiling, Stepped, Submit, ToChild, Unframer, frame

STEP_S = 0.004


class Child(asyncio.Protocol):
    """The child's end of the socket."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended
        self._unframer = Unframer.at_child()
        self._tasks: set[asyncio.Task[None]] = set()
        self.engine = FakeEngine(step_s=STEP_S, max_num_seqs=16)
        self.engine.on_step = self._stepped

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        for message in self._unframer.feed(data):
            self._obey(message)

    def _stepped(self, output: StepOutput) -> None:
        self._transport.write(frame(Stepped(output)))  # type: ignore[attr-defined]  # a socket's is one

    def _obey(self, message: ToChild) -> None:
        match message:
            case Configure():
                self._transport.write(frame(Ready(self.engine.info)))  # type: ignore[attr-defined]
            case Submit(_, request):
                task = asyncio.get_running_loop().create_task(_read(self.engine.submit(request)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Abort(request_id):
                self.engine.abort(request_id)
            case SetCeiling(request_id, tokens, final):
                self.engine.set_ceiling(request_id, tokens, final=final)


async def _read(stream: UpdateStream) -> None:
    """The parent gets the updates with the step."""
    try:
        async for _ in stream:
            pass
    except EngineError:
        pass


async def main(descriptor: int) -> None:
    """Serve until the parent is gone."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    child = Child(ended)
    await child.engine.start()
    await loop.create_connection(lambda: child, sock=socket.socket(fileno=descriptor))
    await ended


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
