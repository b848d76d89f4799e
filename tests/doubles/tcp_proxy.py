"""A TCP proxy that can lose answers: what happens on a bad network, between a client and a real server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class TcpProxy:
    """Listens on a free port of 127.0.0.1 and forwards to `port`. Change `mode` at any time:

    - "pass": both ways.
    - "swallow": requests reach the server; at its first answer the client's connection is cut (the effect took place).
    - "refuse": new connections are closed at once, open ones are cut.
    - "delay": answers come `delay_s` later.
    - "say": requests do not reach the server; each is answered with `said`, and its connection is cut.
    """

    def __init__(self, port: int) -> None:
        self.mode = "pass"
        self.swallowed = 0
        self.delay_s = 0.0
        self.said = b""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def refuse(self) -> None:
        """Cut what is open and take nothing new."""
        self.mode = "refuse"
        self._cut_all()

    def say(self, answer: bytes) -> None:
        """Answer in the server's place, whatever is asked."""
        self.said = answer
        self.mode = "say"

    def close(self) -> None:
        """Stop listening, cut everything, wait for the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut_all()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # nobody listens there now
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, is_answer), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_answer and self.mode == "swallow":
                    self.swallowed += 1
                    break
                if not is_answer and self.mode == "say":
                    source.sendall(self.said)
                    break
                if is_answer and self.mode == "delay":
                    time.sleep(self.delay_s)
                sink.sendall(data)
        self._cut(source, sink)

    def _cut(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._lock:
            self._open -= set(sockets)

    def _cut_all(self) -> None:
        with self._lock:
            sockets = list(self._open)
        self._cut(*sockets)
