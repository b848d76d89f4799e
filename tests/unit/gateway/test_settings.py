"""Settings: four sources in order, nothing unknown, nothing secret printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.keyfile import admin_key
from gateway.settings import Settings, SettingsError, fields, load
from gateway.stores import cluster_of


def test_order_of_sources(tmp_path: Path) -> None:
    config = tmp_path / "meterhouse.toml"
    config.write_text('host = "a"\nport = 1\nmax_num_seqs = 4\n')
    environ = {"METERHOUSE_PORT": "2", "METERHOUSE_MAX_N": "5", "METERHOUSE_TEST_ANYTHING": "x", "PATH": "y"}
    settings = load({"port": "3", "model": None}, environ, config)
    assert (settings.host, settings.port, settings.max_num_seqs, settings.max_n) == ("a", 3, 4, 5)
    assert settings.model == "default"


def test_a_variable_of_the_models_room_is_no_unknown_setting() -> None:
    assert load({}, {"METERHOUSE_MODEL_WHEEL": "/some.whl", "METERHOUSE_PORT": "8001"}).port == 8001


def test_config_named_by_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "other.toml"
    config.write_text('data_dir = "~/x"\n')
    assert load({}, {"METERHOUSE_CONFIG": str(config)}).data_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "names"),
    [
        ({}, {"METERHOUSE_PRT": "1"}, "", ["METERHOUSE_PRT"]),
        ({}, {}, "prt = 1", ["prt"]),
        ({}, {}, "[server]\nport = 1", ["server"]),
        ({}, {}, 'port = "1x"', ["port"]),
        ({}, {}, "port = ", ["TOML"]),
        ({"port": "70000"}, {}, "", ["port", "command line"]),
        ({"nothing": 1}, {}, "", ["nothing"]),
        ({}, {"METERHOUSE_DEVICE": "tpu"}, "", ["device", "cuda"]),
        ({}, {"METERHOUSE_ADMIN_KEY": " "}, "", ["admin_key"]),
        ({}, {"METERHOUSE_CONFIG": "/nowhere.toml"}, None, ["/nowhere.toml"]),
    ],
)
def test_faults_are_named(
    tmp_path: Path, flags: dict[str, object], environ: dict[str, str], toml: str | None, names: list[str]
) -> None:
    config = None
    if toml is not None:
        config = tmp_path / "meterhouse.toml"
        config.write_text(toml)
    with pytest.raises(SettingsError) as caught:
        load(flags, environ, config)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize("given", ["", "user:pass@"])
@pytest.mark.parametrize("rest", ["/services/T0/B0/s3cret", "?token=s3cret", "/#s3cret", "/a@s3cret/b"])
def test_of_where_alerts_go_only_the_host_is_shown(given: str, rest: str) -> None:
    settings = load({"alert_url": f"https://{given}hooks.example:8443{rest}"}, {})
    assert settings.shown()["alert_url"] == "https://hooks.example:8443/***"
    assert "s3cret" not in repr(settings)
    assert "pass" not in settings.shown()["alert_url"]


def test_secrets_are_not_shown() -> None:
    settings = Settings(
        admin_key="s3cret",
        stripe_api_key="s3cret",
        clickhouse_url="https://user:s3cret@host/db?password=s3cret&x=1",
        ledger_url="postgresql+psycopg://user:s3c@ret@host/db".replace("s3c@ret", "s3cret"),
    )
    for text in (repr(settings), str(settings), str(settings.shown())):
        assert "s3cret" not in text
        assert "host/db" in text


def test_stripes_own_variables() -> None:
    environ = {"STRIPE_API_KEY": "sk_a", "STRIPE_API_BASE": "http://localhost:1", "METERHOUSE_STRIPE_API_KEY": "sk_b"}
    settings = load({}, environ)
    assert (settings.stripe_api_key, settings.stripe_api_base) == ("sk_b", "http://localhost:1")


def test_places_under_the_data_folder() -> None:
    settings = Settings(data_dir=Path("/d"))
    assert settings.clickhouse == "chdb:///d/clickhouse"
    assert settings.ledger == "sqlite:////d/ledger.sqlite3"
    assert Settings(clickhouse_url="http://x", ledger_url="sqlite:///y").clickhouse == "http://x"
    assert Settings(host="0.0.0.0", port=1).base_url == "http://127.0.0.1:1"


def test_every_setting_is_described() -> None:
    described = fields()
    assert [field.name for field in described] == list(Settings.__struct_fields__)
    for field in described:
        assert field.description, field.name
        assert field.type in (str, int, float, bool, Path), field.name


def test_every_setting_can_be_given_by_every_source(tmp_path: Path) -> None:
    choices = {"device": "cpu", "dtype": "float32", "log_level": "debug", "log_format": "json"}
    choices |= {"export_mode": "meter", "invoice_automation": "draft", "alert_url": "https://a.example/"}
    choices |= {"quantization": "int8", "native": "off", "memory_utilization": "0.5", "adapter_slots": "8"}
    examples = {int: "4194304", float: "2.5", bool: "true", Path: "/x", str: "text"}
    special = {"port": "8001", "block_size": "32", "max_n": "8", "max_num_seqs": "8", "max_prompts": "8"}
    special |= {"clickhouse_url": "chdb:///x", "ledger_url": "sqlite:///x", "dunning_steps": "suspend@9"}
    special |= {"clickhouse_replicated": "false"}
    for field in fields():
        text = {**choices, **special}.get(field.name, examples[field.type])
        by_flag, by_variable = load({field.name: text}, {}), load({}, {field.variable: text})
        config = tmp_path / "one.toml"
        config.write_text(f"{field.name} = {text}" if field.type in (int, float, bool) else f'{field.name} = "{text}"')
        by_file = load({}, {}, config)
        assert by_flag == by_variable == by_file != Settings(), field.name
        assert isinstance(getattr(by_flag, field.name), field.type), field.name


def test_admin_key_is_minted_once_for_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "new")
    key = admin_key(settings)
    assert key == admin_key(settings)
    assert settings.admin_key_file.stat().st_mode & 0o777 == 0o600
    assert admin_key(Settings(data_dir=tmp_path / "new", admin_key="given")) == "given"
    assert [path.name for path in settings.data_dir.iterdir()] == ["admin.key"]
    settings.admin_key_file.write_text("")
    with pytest.raises(SettingsError):
        admin_key(settings)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::2", "http://[fd00::2]:8000"),
        ("box.example", "http://box.example:8000"),
    ],
)
def test_where_a_client_finds_the_server(host: str, url: str) -> None:
    assert load({"host": host}, {}).base_url == url


@pytest.mark.parametrize(
    ("name", "url", "told"),
    [
        ("ledger_url", "mysql://me:hunter2@host/db", "sqlite:///path or postgresql+psycopg://"),
        ("ledger_url", "postgresql://me:hunter2@host/db", "postgresql+psycopg://"),
        ("clickhouse_url", "clickhouse://me:hunter2@host/db", "chdb:///absolute/path or http"),
    ],
)
def test_a_store_of_a_kind_that_does_not_work_is_refused_with_those_that_do(name: str, url: str, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({name: url}, {})
    assert told in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_cluster_is_of_servers_and_keeps_every_month() -> None:
    assert cluster_of(load({}, {})) is None
    on_server = {"clickhouse_url": "http://host/db", "clickhouse_cluster": "all"}
    assert cluster_of(load(on_server, {})) == ("all", True)
    assert cluster_of(load(on_server | {"clickhouse_replicated": "false"}, {})) == ("all", False)
    with pytest.raises(SettingsError, match="retention_months"):
        cluster_of(load(on_server | {"retention_months": "3"}, {}))
    with pytest.raises(SettingsError, match="clickhouse_url of one of"):
        cluster_of(load({"clickhouse_cluster": "all"}, {}))
    with pytest.raises(SettingsError, match="clickhouse_cluster"):
        load({"clickhouse_cluster": "a' b"}, {})


def test_the_stores_that_work_are_taken() -> None:
    urls = {"ledger_url": "postgresql+psycopg://me:x@host/db", "clickhouse_url": "https://me:x@host:8443/db"}
    settings = load(urls, {})
    assert (settings.ledger, settings.clickhouse) == tuple(urls.values())
    assert load({"ledger_url": "sqlite:////x/l.sqlite3", "clickhouse_url": "chdb:///x"}, {}).clickhouse == "chdb:///x"
