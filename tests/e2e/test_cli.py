"""The command line, as a person or a script runs it: beside a server, and on a data folder without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.settings import fields
from tests.fixtures.server import ADMIN_KEY, ServerProcess, free_port

PRICES = ("--prompt=1.00", "--cached=0.10", "--completion=3.00")


class Cli:
    """Runs `meterhouse …` with the same connection flags every time."""

    def __init__(self, *flags: str, **env: str) -> None:
        self.flags = flags
        self.env = {**os.environ, "METERHOUSE_ADMIN_KEY": ADMIN_KEY, **env}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gateway.cli", *arguments],
            env=self.env,
            text=True,
            capture_output=True,
            timeout=120,
            cwd=Path(__file__).parents[2],
        )

    def json(self, *arguments: str) -> Any:
        """The decoded `--json` output of a command that succeeds."""
        done = self.run(*arguments, *self.flags, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def fails(self, *arguments: str, code: int = 1) -> str:
        """The one sentence of a command that fails."""
        done = self.run(*arguments, *self.flags)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("Error: " if code == 1 else "Usage: ")
        return done.stderr


class InProcess(Cli):
    """The same without a process for each command."""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = CliRunner(env={"METERHOUSE_ADMIN_KEY": ADMIN_KEY}).invoke(main, arguments)
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def folder(tmp_path: Path) -> Cli:
    """A data folder that no server has yet."""
    assert Cli().run("migrate", f"--data-dir={tmp_path / 'data'}").returncode == 0
    return Cli(f"--data-dir={tmp_path / 'data'}", f"--port={free_port()}")


@pytest.fixture
def server(real_server: ServerProcess) -> Cli:
    return Cli(f"--port={real_server.port}", f"--data-dir={real_server.data_dir}")


def test_a_tenant_is_set_up_without_a_server(folder: Cli) -> None:
    made = folder.json("tenant", "create", "Acme", "--id=acme", "--limit", "concurrent=4")
    assert (made["id"], made["limits"]) == ("acme", {"concurrent": 4})
    assert folder.json("tenant", "update", "acme", "--name", "Acme Inc")["name"] == "Acme Inc"
    key = folder.json("key", "create", "acme", "--name=laptop")
    assert key["key"].startswith("mh-")
    folder.json("price", "set", "*", *PRICES, "--effective-at=2026-01-01T00:00:00Z")
    folder.json("credit", "grant", "acme", "10.00", "--reason=first")
    assert folder.json("balance", "acme")["available"] == "10.00"
    shown = folder.run("tenant", "list", *folder.flags)
    assert shown.returncode == 0
    assert "Acme Inc" in shown.stdout
    assert "concurrent=4" in shown.stdout
    secretless = folder.run("key", "list", "acme", *folder.flags)
    assert key["prefix"] in secretless.stdout
    assert key["key"] not in secretless.stdout
    folder.run("key", "revoke", key["id"], *folder.flags).check_returncode()
    assert folder.json("key", "list", "acme")[0]["revoked_at"] is not None
    assert folder.json("usage") == folder.json("usage", "show", "--bucket=hour") == []
    assert folder.json("usage", "unrated", "--tenant=acme") == []
    assert folder.json("usage", "rate") == {"rated": 0}
    assert folder.json("gateway", "list") == []
    assert "nobody" in folder.fails("gateway", "remove", "nobody")
    done = folder.run("reconcile", *folder.flags)
    assert (done.returncode, done.stdout.strip()) == (0, "Everything agrees.")


def test_an_invoice_is_made_by_hand_without_a_server(folder: Cli) -> None:
    folder.json("tenant", "create", "Acme", "--id=acme")
    made = folder.json("invoice", "create", "acme", "2026-01-01", "2026-02-01T00:00:00Z")
    assert (made["status"], made["total"], made["lines"]) == ("draft", "0.00", [])
    assert folder.json("invoice", "finalize", made["id"])["status"] == "finalized"
    assert "STRIPE_API_KEY" in folder.fails("invoice", "export", made["id"])
    assert folder.json("invoice", "void", made["id"])["status"] == "void"
    shown = folder.run("invoice", "show", made["id"], *folder.flags)
    assert "void" in shown.stdout
    assert [one["id"] for one in folder.json("invoice", "list", "--tenant=acme")] == [made["id"]]


def test_budgets_grants_suspension_and_a_statement(real_server: ServerProcess, tmp_path: Path) -> None:
    server = InProcess(f"--port={real_server.port}", f"--data-dir={real_server.data_dir}")
    server.json("tenant", "create", "Zeta", "--id=zeta", "--dunning-steps=suspend@9")
    server.json("credit", "grant", "zeta", "5.00", "--reason=x", "--priority=3", "--expires-at=2099-01-01")
    (grant,) = server.json("credit", "list", "zeta")
    assert (grant["left"], grant["priority"], grant["expires_at"]) == ("5.00", 3, "2099-01-01T00:00:00Z")
    budget = server.json("budget", "set", "zeta", "daily", "2.50", "--per=day", "--soft", "--threshold=50")
    assert (budget["hard"], budget["thresholds"], budget["left"]) == (False, [50], "2.50")
    assert server.json("budget", "change", budget["id"], "--amount=3", "--hard")["hard"] is True
    assert [one["amount"] for one in server.json("budget", "list", "zeta")] == ["3.00"]
    assert server.run("budget", "remove", budget["id"], *server.flags).stdout == "Removed.\n"
    assert server.json("budget", "list", "zeta") == []
    suspended = server.json("tenant", "suspend", "zeta", "--reason=Abuse.")
    assert [one["reason"] for one in suspended["suspensions"]] == ["Abuse."]
    assert server.json("tenant", "reactivate", "zeta", "--reason=Sorry.")["status"] == "active"
    assert server.json("dunning", "list", "--tenant=zeta", "--ended") == []
    made = server.json("invoice", "create", "zeta", "2026-01-01", "2026-02-01")["id"]
    assert "draft" in server.fails("invoice", "statement", made)
    server.json("invoice", "finalize", made)
    assert server.json("invoice", "statement", made)["statement"].startswith("<!DOCTYPE html>")
    file = tmp_path / "statement.csv"
    server.run("invoice", "statement", made, "--format=csv", f"--output={file}", *server.flags)
    assert file.read_bytes().startswith(b"invoice,status,tenant,")


def test_an_adapter_needs_a_server(folder: Cli, tmp_path: Path) -> None:
    folder.json("tenant", "create", "Acme", "--id=acme")
    assert "start the server" in folder.fails("adapter", "add", "acme", "x", str(tmp_path))


def test_a_whole_customer_beside_a_running_server(server: Cli, real_server: ServerProcess) -> None:
    server.json("tenant", "create", "Cli", "--id=cli")
    server.json("price", "set", "*", *PRICES, "--tenant=cli")
    server.json("credit", "grant", "cli", "5.00", "--reason=test")
    for amount in ("ten", "-3", "-0.5"):
        assert "Error: amount: " in server.fails("credit", "grant", "cli", amount, "--reason=x")
    assert "No such option" in server.fails("credit", "grant", "cli", "3", "--resaon=x", code=2)
    key = server.json("key", "create", "cli")["key"]
    with httpx.Client(base_url=real_server.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    (row,) = server.json("usage", "--tenant=cli", "--group-by=model,key", "--bucket=month")
    assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (1, usage["prompt_tokens"], 3)
    spent = Decimal(usage["prompt_tokens"]) / 1_000_000 + Decimal(9) / 1_000_000
    assert Decimal(row["amount"]) == spent
    assert Decimal(server.json("balance", "cli")["available"]) == 5 - spent
    table = server.run("usage", "--tenant=cli", *server.flags)
    assert model in table.stdout
    assert row["amount"] in table.stdout
    assert server.json("reconcile")["ok"] is True
    (gateway,) = server.json("gateway", "list")
    assert (gateway["id"], gateway["alive"], gateway["this"]) == ("gw0", True, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tenant", "show", "nobody"), "nobody"),
        (("balance", "../../keys"), "nothing at this URL"),
        (("credit", "grant", "nobody", "1.00", "--reason=x"), "nobody"),
        (("price", "set", "*", "--prompt=-1", "--cached=0", "--completion=0"), "per_million.prompt"),
        (("usage", "--start=yesterday"), "start"),
        (("invoice", "create", "nobody", "2026-01-01", "2026-01-01"), "period_end"),
    ],
)
def test_a_refusal_is_one_sentence(server: Cli, arguments: tuple[str, ...], told: str) -> None:
    assert told in server.fails(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("tenant", "create", "X", "--limit", "fast"),
        ("credit", "grant", "x", "1"),
        ("usage", "--bucket=week"),
        ("nonsense",),
    ],
)
def test_a_wrong_use_is_explained(arguments: tuple[str, ...]) -> None:
    done = Cli().run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ")


def test_a_wrong_admin_key_is_told(real_server: ServerProcess) -> None:
    cli = Cli(f"--port={real_server.port}", "--admin-key=wrong")
    assert "admin key" in cli.fails("tenant", "list")


def test_a_data_folder_that_a_server_has_is_not_opened_twice(real_server: ServerProcess) -> None:
    cli = Cli(f"--data-dir={real_server.data_dir}", f"--port={free_port()}")
    assert "Another Meterhouse server runs" in cli.fails("tenant", "list")


@pytest.mark.parametrize("answer", [b'{"status":"ok"}', b"[1]", b"<html>"])
def test_the_admin_key_is_not_sent_to_a_stranger(folder: Cli, answer: bytes) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, dict(self.headers)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        told = Cli(folder.flags[0], f"--port={server.server_port}").fails("tenant", "list")
        server.shutdown()
        thread.join()
    assert "is not Meterhouse" in told
    assert [path for path, _ in asked] == ["/health/live"]
    assert ADMIN_KEY not in str(asked)


def test_without_server_and_folder_both_are_named(tmp_path: Path) -> None:
    told = Cli(f"--data-dir={tmp_path / 'none'}", f"--port={free_port()}").fails("tenant", "list")
    assert "no server answers" in told
    assert not (tmp_path / "none").exists()


def test_an_unknown_setting_is_an_error(tmp_path: Path) -> None:
    told = Cli(f"--data-dir={tmp_path}", METERHOUSE_SPEED="fast").fails("tenant", "list")
    assert "METERHOUSE_SPEED" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--port=99999",), "port"),
        (("--port=many",), "port"),
        (("--model=/no/such/folder",), "model"),
        (("--device=toaster",), "device"),
    ],
)
def test_serve_refuses_a_bad_setting_with_one_sentence(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = Cli().run("serve", f"--data-dir={tmp_path / 'data'}", *arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert told in done.stderr


def test_serve_refuses_a_port_that_is_taken(real_server: ServerProcess, tmp_path: Path) -> None:
    done = Cli().run("serve", f"--data-dir={tmp_path / 'data'}", f"--port={real_server.port}")
    assert done.returncode == 1
    assert f"Port {real_server.port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_setting_is_a_flag_of_serve_and_named_with_its_variable() -> None:
    shown = Cli().run("serve", "--help").stdout
    for field in fields():
        assert field.flag in shown
        assert field.variable in shown.replace("\n", " ")


@pytest.mark.parametrize(
    "command", ["tenant", "key", "adapter", "price", "credit", "usage", "balance", "invoice", "budget", "dunning"]
)
def test_every_command_has_help(command: str) -> None:
    done = Cli().run(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")


def test_help_does_not_load_the_engine_or_the_stores() -> None:
    heavy = ("torch", "clickhouse_connect", "litestar", "sqlalchemy")
    code = f"import sys, gateway.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
