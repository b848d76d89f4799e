"""Every PromQL of the dashboards, asked of a real Prometheus that scrapes our real metrics; rules by promtool."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dashboards import panels
from engine.types import Cost, EngineStats, TokenCounts
from gateway.telemetry import METRICS, Telemetry
from tests.unit.dashboards.test_boards import PROMETHEUS, queries


@pytest.mark.parametrize(
    "check",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules.test.yml")],
)
def test_promtool_accepts(check: tuple[str, ...], prometheus_programs: dict[str, Path]) -> None:
    done = subprocess.run(
        [str(prometheus_programs["promtool"]), *check], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _moving() -> Telemetry:
    """A gateway's metrics in which everything moves with every scrape."""
    telemetry = Telemetry("smollm", "0.1.0")
    counts = TokenCounts(prompt=100, cached=40, completion=20, recomputed=3, rejected=1)
    scrapes = 0

    def move() -> None:
        nonlocal scrapes
        scrapes += 1
        telemetry.counted(counts)
        telemetry.settled("chat.completions", "finished", "stop", counts, Cost(compute_us=1500, kv_block_us=64_000))
        telemetry.engine(
            EngineStats(
                running=2,
                waiting=1,
                blocks_total=10,
                blocks_used=5,
                preemptions_total=scrapes,
                prefix_queries_total=100 * scrapes,
                prefix_hits_total=40 * scrapes,
                steps_total=10 * scrapes,
                busy_us_total=500_000 * scrapes,
                adapters_loaded=3,
            )
        )
        telemetry.engine_state(True, scrapes)
        for spec in METRICS:
            _touch(telemetry[spec.name], spec.kind, spec.labels if spec.labels != ("model_name",) else ())

    telemetry.sample_with(move)
    return telemetry


def _touch(metric: Any, kind: str, labels: tuple[str, ...]) -> None:
    series = metric.labels(*("503" if label == "status" else "x" for label in labels)) if labels else metric
    {"counter": lambda: series.inc(), "gauge": lambda: series.set(1), "histogram": lambda: series.observe(0.1)}[kind]()


@pytest.fixture(scope="module")
def exporter() -> Iterator[int]:
    telemetry = _moving()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = telemetry.exposition()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(
    exporter: int, prometheus_programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a Prometheus that has scraped the exporter a few times, with our rules loaded."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (PROMETHEUS / "prometheus.yml").read_text()
    config = re.sub(r"_interval: 10s", "_interval: 1s", config.replace("meterhouse:8000", f"127.0.0.1:{exporter}"))
    (folder / "prometheus.yml").write_text(config)
    (folder / "rules.yml").write_text((PROMETHEUS / "rules.yml").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        str(prometheus_programs["prometheus"]),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _wait(f"http://{address}", process)
            yield f"http://{address}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)


def ask(base: str, expression: str) -> list[dict[str, Any]]:
    """The instant vector of an expression; raises on an error of Prometheus."""
    with urllib.request.urlopen(f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expression})}") as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return result


def _wait(base: str, process: subprocess.Popen[bytes]) -> None:
    """Until four scrapes are in and the rules have been evaluated."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        try:
            scraped = ask(base, "count_over_time(meterhouse_engine_up[1m]) >= 4")
            if scraped and ask(base, "meterhouse:http_error_ratio:rate5m"):
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError("Prometheus did not scrape in time")


def _filled(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*")


PANELS = [(title, query) for title, query in queries(panels.PROMETHEUS) if not title.startswith("variable")]


@pytest.mark.parametrize(("title", "query"), PANELS, ids=[f"{title}-{n}" for n, (title, _) in enumerate(PANELS)])
def test_every_panel_shows_something(prometheus: str, title: str, query: str) -> None:
    result = ask(prometheus, _filled(query))
    assert result, f"{title}: no data for {query}"
    assert all(sample["value"][1] != "NaN" for sample in result)


def test_the_variable_lists_the_instances(prometheus: str) -> None:
    (query,) = [query for title, query in queries(panels.PROMETHEUS) if title == "variable instance"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
    assert found
    assert [sample["metric"][found[2]] for sample in ask(prometheus, found[1])]


def test_no_alert_has_an_unknown_series(prometheus: str) -> None:
    """Each alert's expression runs, and each recording rule has recorded."""
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules") as answer:
        rules = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    for rule in rules:
        if rule["type"] == "recording":
            assert ask(prometheus, rule["name"]), rule["name"]
