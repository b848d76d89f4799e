"""What an operator copies: it parses, and names only files, settings and commands that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gateway.settings import FOREIGN_VARIABLES, PREFIX, Settings, load

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "systemd" / "meterhouse.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def _manifests() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "meterhouse.yaml").read_text())
    return {document["kind"]: document for document in documents}


def _known(variables: set[str]) -> None:
    settings = {PREFIX + name.upper() for name in Settings.__struct_fields__}
    ours = {name for name in variables if name.startswith((PREFIX, "STRIPE_"))}
    assert ours
    assert ours <= settings | set(FOREIGN_VARIABLES)


def test_the_example_settings_load_and_show_real_defaults() -> None:
    path = DEPLOY / "meterhouse.example.toml"
    settings = load({}, {}, path)
    assert (settings.port, settings.data_dir) == (8000, Path("/var/lib/meterhouse"))
    commented = re.findall(r"^# (\w+ = .+)$", path.read_text(), re.MULTILINE)
    assert len(commented) == 4
    uncommented = path.read_text() + "\n" + "\n".join(commented)
    assert set(tomllib.loads(uncommented)) <= set(Settings.__struct_fields__)


def test_compose_mounts_what_is_there_and_sets_what_is_known() -> None:
    compose = _compose()
    for name, service in compose["services"].items():
        assert ("image" in service) or ("build" in service), name
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], mount
        for needed in service.get("depends_on", []):
            assert needed in compose["services"]
    _known(set(compose["services"]["meterhouse"]["environment"]))
    build = compose["services"]["meterhouse"]["build"]
    dockerfile = (ROOT / build["context"] / "Dockerfile").read_text()
    assert all(f"ARG {argument}\n" in dockerfile for argument in build["args"])


def test_compose_and_the_provisioning_agree_on_hosts_and_variables() -> None:
    services = _compose()["services"]
    provisioned = (ROOT / "dashboards/grafana/provisioning/datasources/meterhouse.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", provisioned)) <= set(services["grafana"]["environment"])
    for source in yaml.safe_load(provisioned)["datasources"]:
        host = source.get("url", source["jsonData"].get("host", "")).removeprefix("http://").split(":")[0]
        assert host in services
    scraped = yaml.safe_load((ROOT / "dashboards/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    host, _, port = scraped["static_configs"][0]["targets"][0].partition(":")
    assert host in services
    assert f"METERHOUSE_PORT={port}" in DOCKERFILE
    mounted = {mount.split(":")[1] for mount in services["grafana"]["volumes"]}
    folder = yaml.safe_load((ROOT / "dashboards/grafana/provisioning/dashboards/meterhouse.yaml").read_text())
    assert folder["providers"][0]["options"]["path"] in mounted


def test_every_secret_of_compose_must_be_given() -> None:
    """A password without a value stops compose; none has a default."""
    text = (ROOT / "compose.yaml").read_text()
    for name in ("METERHOUSE_ADMIN_KEY", "STORE_PASSWORD", "GRAFANA_PASSWORD"):
        assert f"${{{name}:?" in text


def test_the_secret_of_kubernetes_must_be_made() -> None:
    """The manifest brings no key that would work as it stands, and the pod needs one."""
    manifests = _manifests()
    assert "Secret" not in manifests
    (container,) = manifests["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (source,) = container["envFrom"]
    assert source == {"secretRef": {"name": "meterhouse"}}
    command = f"kubectl create secret generic {source['secretRef']['name']} --from-literal=METERHOUSE_ADMIN_KEY="
    assert command in (DEPLOY / "kubernetes" / "meterhouse.yaml").read_text()


def test_the_dockerfile_copies_what_is_there_and_sets_what_is_known() -> None:
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    _known(set(re.findall(r"\b(METERHOUSE_\w+)=", DOCKERFILE)))
    assert 'ENTRYPOINT ["meterhouse"]' in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "data", ".env"} <= set(ignored)
    needed = {"pyproject.toml", "constraints.txt", "gateway", "engine", "kernels", "metering", "billing", "migrations"}
    assert not needed & set(ignored)


def test_torch_is_one_version_everywhere() -> None:
    (version,) = re.findall(r"^ARG TORCH_VERSION=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert f"torch=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert f'TORCH_VERSION = "{version}"' in (DEPLOY / "install.py").read_text()


def test_the_kubernetes_manifest_fits_the_image() -> None:
    manifests = _manifests()
    pod = manifests["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False  # else METERHOUSE_PORT=tcp://… reaches our settings
    text = (DEPLOY / "kubernetes" / "meterhouse.yaml").read_text()
    _known({entry["name"] for entry in container["env"]} | set(re.findall(r"\b([A-Z_]+)=", text)))
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == set(re.findall(r"METERHOUSE_\w+_DIR=(\S+)", DOCKERFILE))
    volumes = {v["name"] for v in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert f"--uid {pod['securityContext']['runAsUser']}" in DOCKERFILE
    assert manifests["StatefulSet"]["spec"]["replicas"] == 1
    assert container["image"] == _compose()["services"]["meterhouse"]["image"]


def test_everyone_waits_longer_than_a_drain_takes() -> None:
    seconds = 90
    settings = load({}, {}, DEPLOY / "meterhouse.example.toml")
    assert settings.drain_s + settings.abort_timeout_s < seconds
    assert f"TimeoutStopSec={seconds}" in UNIT
    assert _compose()["services"]["meterhouse"]["stop_grace_period"] == f"{seconds}s"
    pod = _manifests()["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == seconds


def test_the_unit_starts_a_command_that_exists() -> None:
    from gateway.cli import main

    (line,) = re.findall(r"^ExecStart=(.+)$", UNIT, re.MULTILINE)
    program, *arguments = shlex.split(line)
    assert Path(program).name == "meterhouse"
    shown = CliRunner().invoke(main, [arguments[0], "--help"])
    assert shown.exit_code == 0
    assert all(argument in shown.output for argument in arguments if argument.startswith("--"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="only systemd can judge a unit")
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "meterhouse.service"
    there = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE)  # ours is not installed here
    unit.write_text(there)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    faults = [line for line in done.stderr.splitlines() if "meterhouse.service" in line]
    assert not faults, done.stderr
