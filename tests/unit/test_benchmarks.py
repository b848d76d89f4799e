"""The servers that `benchmarks/serve.py` starts and ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from tests.fixtures.server import free_port

SERVER = """
import http.server, os, pathlib, sys, time
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
if os.fork() == 0:  # a worker, as servers have
    time.sleep(300)
pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
"""


@pytest.fixture(scope="module")
def servers() -> ModuleType:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import servers
    finally:
        sys.path.remove(folder)
    return servers


def test_a_peer_is_read_from_one_argument(servers: ModuleType, tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text('{"lora": [{"id": 0, "scale": 1}]}\n\n{"lora": [{"id": 1, "scale": 1}]}\n')
    peer = servers.Peer.parse(
        f"name=x,url=http://h/v1,models=a;b,bodies={bodies},workloads=lora,ignore_eos=no,start=run --a=b,c --port 1"
    )
    assert (peer.server.name, peer.server.models, peer.workloads) == ("x", ["a", "b"], ["lora"])
    assert [body["lora"][0]["id"] for body in peer.server.bodies] == [0, 1]
    assert (peer.server.ignore_eos, peer.start) == (False, "run --a=b,c --port 1")
    assert servers.Peer.parse("name=x,url=u,model=m").workloads == ["short", "mixed"]
    for wrong in ("name=x,url=u", "url=u,model=m", "name=x,url=u,model=m,colour=red", "start=run"):
        with pytest.raises(ValueError, match="a peer"):
            servers.Peer.parse(wrong)


def test_a_peer_is_started_waited_for_and_ended_with_all_its_processes(servers: ModuleType, tmp_path: Path) -> None:
    port, script, pid, log = free_port(), tmp_path / "server.py", tmp_path / "pid", tmp_path / "log"
    script.write_text(SERVER)
    peer = servers.Peer.parse(
        f"name=x,url=http://127.0.0.1:{port}/v1,model=m,start={sys.executable} {script} {port} {pid}"
    )
    with servers.peer(peer, log) as server:
        assert httpx.get(f"{server.url}/models").status_code == 200
        assert server.ready_s > 0
        with pytest.raises(servers.Absent, match="listens at its address already"), servers.peer(peer, log):
            pass
    with pytest.raises(ProcessLookupError):
        os.killpg(int(pid.read_text()), 0)


def test_a_peer_that_does_not_come_up_is_absent_with_its_last_words(servers: ModuleType, tmp_path: Path) -> None:
    peer = servers.Peer.parse("name=x,url=http://127.0.0.1:1/v1,model=m,start=echo no luck >&2; exit 3")
    with pytest.raises(servers.Absent, match="before it answered: no luck"):
        servers.peer(peer, tmp_path / "log").__enter__()
