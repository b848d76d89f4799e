"""Every setting of the server: its name, default, meaning, and where its value came from.

Knows: defaults < `meterhouse.toml` < `METERHOUSE_*` < flags, and which values are secrets. Does not know what a
setting does. An unknown key in the file or an unknown `METERHOUSE_*` variable is an error: a misspelt limit that
is silently ignored would be found on an invoice.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from billing.steps import Policy, parse_steps

PREFIX = "METERHOUSE_"
TEST_PREFIX = "METERHOUSE_TEST_"  # belongs to the test-suite, never to a server
CONFIG_VARIABLE = "METERHOUSE_CONFIG"
WHEEL_VARIABLE = "METERHOUSE_MODEL_WHEEL"  # `engine.weights` reads it: a local copy of the default model's package
CONFIG_FILE = "meterhouse.toml"
FOREIGN_VARIABLES = {
    "STRIPE_API_KEY": "stripe_api_key",
    "STRIPE_API_BASE": "stripe_api_base",
    "STRIPE_WEBHOOK_SECRET": "stripe_webhook_secret",
}
SECRETS = frozenset({"admin_key", "stripe_api_key", "stripe_webhook_secret", "alert_secret"})
REDACTED = "***"


class SettingsError(Exception):
    """A setting that is unknown or has a value that cannot be used; the text is one clear sentence."""


def _cache_dir() -> Path:
    return Path.home() / ".cache" / "meterhouse"


Port = Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")]
Count = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration. Units stand last in the names; `None` means what the description says."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Port = 8000
    data_dir: Annotated[Path, Meta(description="folder of everything this server keeps")] = Path("data")
    cache_dir: Annotated[Path, Meta(description="folder of converted models, shared by servers")] = msgspec.field(
        default_factory=_cache_dir
    )
    model: Annotated[str, Meta(description="`default`, a Hugging Face folder, a GGUF file or a hub name")] = "default"
    demo: Annotated[bool, Meta(description="make two demo tenants with keys, prices and credit on first start")] = False

    admin_key: Annotated[str | None, Meta(description="bearer key of the admin API; unset: made on first start")] = None
    clickhouse_url: Annotated[str | None, Meta(description="usage store; unset: chDB in the data folder")] = None
    clickhouse_cluster: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")] | None,
        Meta(description="cluster of the usage store, as its servers' remote_servers name it; unset: one server"),
    ] = None
    clickhouse_replicated: Annotated[
        bool, Meta(description="false: each shard of the cluster is one server, without Keeper; migrate each of them")
    ] = True
    ledger_url: Annotated[str | None, Meta(description="ledger; unset: SQLite in the data folder")] = None
    stripe_api_key: Annotated[str | None, Meta(description="key for invoice export; unset: export is refused")] = None
    stripe_api_base: Annotated[str | None, Meta(description="other address of the Stripe API, for tests")] = None
    stripe_webhook_secret: Annotated[
        str | None, Meta(description="signing secrets of /webhooks/stripe, by commas; unset: it takes nothing")
    ] = None
    export_mode: Annotated[
        str, Meta(description="invoice: invoices are exported; meter: usage goes to Stripe's Billing Meters instead")
    ] = "invoice"
    signing_key_file: Annotated[
        Path | None,
        Meta(description="Ed25519 key (PEM) that invoices are signed with; unset: made in the data folder"),
    ] = None
    invoice_automation: Annotated[
        str,
        Meta(description="off, draft, finalize or export: how far invoices go by themselves when a period is over"),
    ] = "off"
    invoice_grace_s: Annotated[
        float, Meta(ge=0, description="how long after a period's end its invoice is cut by itself")
    ] = 3600.0
    alert_url: Annotated[str | None, Meta(description="where alerts are posted; unset: they are only listed")] = None
    alert_secret: Annotated[str | None, Meta(description="whsec_… that alerts are signed with")] = None
    alert_spool_lag_s: Annotated[
        float, Meta(gt=0, description="a settlement that waits this long for a store is an alert")
    ] = 300.0
    dunning_steps: Annotated[
        str,
        Meta(description="what follows a failed payment after so many days, as notice@3,notice@7,suspend@14, or none"),
    ] = "notice@3,notice@7"
    dunning_ends_uncollectible: Annotated[
        bool, Meta(description="what is given up as uncollectible is dunned no more, and holds no tenant suspended")
    ] = False
    reconcile_every_s: Annotated[
        float, Meta(ge=0, description="how often the books are compared by themselves; 0: never")
    ] = 3600.0

    device: Annotated[str, Meta(description="auto, cpu or cuda")] = "auto"
    dtype: Annotated[str, Meta(description="auto, float32, bfloat16 or float16")] = "auto"
    quantization: Annotated[
        str, Meta(description="bits of the weights on a CPU: none (as dtype says), int8 or int4")
    ] = "none"
    native: Annotated[
        str, Meta(description="auto, on or off: compute on a CPU by the native library; auto: where it can be built")
    ] = "auto"
    threads: Annotated[Count | None, Meta(description="CPU threads of the engine; unset: all")] = None
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a KV-cache block")] = 16
    kv_cache_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        Meta(description="size of the KV cache; unset: memory_utilization decides"),
    ] = None
    memory_utilization: Annotated[
        float, Meta(gt=0, le=0.95, description="share of the memory free at start that the KV cache takes")
    ] = 0.3
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences computed together")] = 32
    max_num_batched_tokens: Annotated[int, Meta(ge=16, description="token budget of one engine step")] = 512
    max_model_len: Annotated[
        Annotated[int, Meta(ge=16)] | None, Meta(description="longest context; unset: the model's own")
    ] = None
    max_waiting: Annotated[int, Meta(ge=1, description="requests that may queue in the engine")] = 1024
    queue_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="a request that has not begun by then gets 503; unset: it waits for request_timeout_s"),
    ] = None
    public_cache_salts: Annotated[
        str | None,
        Meta(description="values of `cache_salt`, by commas, whose cached prompts all tenants share; unset: none"),
    ] = None
    max_adapters: Annotated[int, Meta(ge=0, description="LoRA adapters that may be loaded, wherever they lie")] = 4096
    adapter_slots: Annotated[int, Meta(ge=1, description="of these, on the device at once")] = 32
    adapter_cache_bytes: Annotated[
        int, Meta(ge=0, description="of these, kept in memory; the rest are read from disk when asked for")
    ] = 1 << 30
    max_lora_rank: Annotated[int, Meta(ge=1, description="largest LoRA rank")] = 64

    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 8 << 20
    max_n: Annotated[int, Meta(ge=1, le=128, description="largest `n` of a request")] = 16
    max_prompts: Annotated[int, Meta(ge=1, le=1024, description="most prompts in one completions request")] = 32
    max_open_requests: Annotated[int, Meta(ge=1, description="requests in flight before 503 is answered")] = 1024
    request_timeout_s: Annotated[float, Meta(gt=0, description="longest a request may take")] = 600.0
    abort_timeout_s: Annotated[float, Meta(gt=0, description="wait for the engine's last word on a cut request")] = 30.0
    write_timeout_s: Annotated[float, Meta(gt=0, description="a client that reads nothing this long is cut")] = 30.0
    keepalive_s: Annotated[float, Meta(gt=0, description="silence on a stream before a keep-alive comment")] = 15.0
    drain_s: Annotated[float, Meta(ge=0, description="time running streams get to finish at shutdown")] = 20.0
    ceiling_stretch: Annotated[int, Meta(ge=1, description="completion tokens held ahead for each choice")] = 64
    ready_cache_s: Annotated[float, Meta(ge=0, description="how long a readiness probe's result stands")] = 5.0

    spool_max_bytes: Annotated[int, Meta(ge=1 << 20, description="settlements kept before 503 is answered")] = 1 << 30
    spool_max_age_s: Annotated[
        float, Meta(gt=0, description="the oldest settlement may wait this long for a store before 503 is answered")
    ] = 604_800.0
    disk_min_free_bytes: Annotated[
        int, Meta(ge=0, description="free on the data folder's disk, for what runs; with less 503 is answered")
    ] = 256 << 20
    ship_max_events: Annotated[int, Meta(ge=1, description="most events in one insert into the usage store")] = 5000
    ship_max_bytes: Annotated[int, Meta(ge=1 << 16, description="of these, most bytes in the spool")] = 16 << 20
    ship_max_age_s: Annotated[
        float, Meta(gt=0, description="longest an event waits for company on its way to the usage store")
    ] = 0.5
    journal_max_bytes: Annotated[int, Meta(ge=1 << 16, description="size of one journal segment")] = 16 << 20
    journal_max_age_s: Annotated[float, Meta(gt=0, description="age at which a journal segment is closed")] = 3600.0
    journal_total_max_bytes: Annotated[
        int, Meta(ge=1 << 20, description="all journal segments before 503 is answered")
    ] = 1 << 30
    idempotency_max_bytes: Annotated[int, Meta(ge=1 << 16, description="answers kept for retries")] = 256 << 20
    idempotency_ttl_s: Annotated[int, Meta(ge=1, description="how long an Idempotency-Key is remembered")] = 86_400
    retention_months: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="whole months of events kept in the usage store, older ones are archived; unset: all"),
    ] = None
    archive_dir: Annotated[
        Path | None, Meta(description="folder of archived events, shared by all gateways; unset: in the data folder")
    ] = None

    gateway_id: Annotated[
        str,
        Meta(min_length=1, max_length=64, description="this server's name in events, unlike any other on its ledger"),
    ] = "gw0"
    lease_expiry_s: Annotated[
        float,
        Meta(gt=0, description="a gateway unheard of for so long stops, and others may spend what it had leased"),
    ] = 86_400.0
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    log_format: Annotated[str, Meta(description="auto, json or console; auto: console on a terminal")] = "auto"

    @property
    def clickhouse(self) -> str:
        """URL of the usage store."""
        return self.clickhouse_url or f"chdb://{self.data_dir.absolute() / 'clickhouse'}"

    @property
    def ledger(self) -> str:
        """URL of the ledger's database."""
        return self.ledger_url or f"sqlite:///{self.data_dir.absolute() / 'ledger.sqlite3'}"

    @property
    def dunning(self) -> Policy:
        """What follows a failed payment, where a tenant has no rule of its own."""
        return Policy(steps=parse_steps(self.dunning_steps), ends_uncollectible=self.dunning_ends_uncollectible)

    @property
    def public_salts(self) -> frozenset[str]:
        """The salts in `public_cache_salts`."""
        return frozenset(filter(None, map(str.strip, (self.public_cache_salts or "").split(","))))

    @property
    def spool_dir(self) -> Path:
        return self.data_dir / "spool"

    @property
    def journal_dir(self) -> Path:
        return self.data_dir / "journal"

    @property
    def archive(self) -> Path:
        return self.archive_dir or self.data_dir / "archive"

    @property
    def adapters_dir(self) -> Path:
        return self.data_dir / "adapters"

    @property
    def admin_key_file(self) -> Path:
        return self.data_dir / "admin.key"

    @property
    def signing_key(self) -> Path:
        return self.signing_key_file or self.data_dir / "signing.key"

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the server."""
        return f"http://{reachable(self.host)}:{self.port}"

    def __repr__(self) -> str:
        """All values, secrets and passwords in URLs redacted."""
        pairs = (f"{name}={value!r}" for name, value in self.shown().items())
        return f"Settings({', '.join(pairs)})"

    def shown(self) -> dict[str, Any]:
        """Name → value as it may be printed or logged."""
        return {name: _redact(name, getattr(self, name)) for name in self.__struct_fields__}


def reachable(host: str) -> str:
    """How a client on this machine writes, in a URL, the address that a server listens on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, described for the command line and the documentation."""

    name: str
    type: type  # str, int, float, bool or Path
    default: Any
    description: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def fields() -> list[Field]:
    """Every setting in order of declaration."""
    hints = get_type_hints(Settings, include_extras=True)
    return [_field(field, hints[field.name]) for field in msgspec.structs.fields(Settings)]


def _field(field: msgspec.structs.FieldInfo, hint: Any) -> Field:
    assert get_origin(hint) is Annotated, field.name
    inner, meta = get_args(hint)[:2]
    members = [member for member in (get_args(inner) or (inner,)) if member is not type(None)]
    kind = get_args(members[0])[0] if get_origin(members[0]) is Annotated else members[0]
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return Field(
        name=field.name,
        type=kind,
        default=default,
        description=meta.description or "",
    )


def _redact(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in SECRETS:
        return REDACTED
    if name == "alert_url":  # whoever knows its path may post there: receivers such as Slack's have no other secret
        return re.sub(r"^([a-z]+://)(?:[^/?#]*@)?([^/?#]*).*$", rf"\1\2/{REDACTED}", value, flags=re.DOTALL)
    if name.endswith("_url"):
        value = re.sub(r"(?<=://)[^/]*@", f"{REDACTED}@", value)
        return re.sub(r"(?<=password=)[^&]*", REDACTED, value)
    return str(value) if isinstance(value, Path) else value


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    """Settings from all four sources; `flags` that are `None` were not given.

    The file is `config`, else `METERHOUSE_CONFIG`, else `meterhouse.toml` in the working directory if there is one.
    Raises `SettingsError`, naming the source and the setting, on anything unknown or of the wrong kind.
    """
    environ = os.environ if environ is None else environ
    names = set(Settings.__struct_fields__)
    values: dict[str, Any] = {}
    for source, found in (
        _from_file(config, environ),
        ("the environment", _from_environment(environ, names)),
        ("the command line", {name: value for name, value in (flags or {}).items() if value is not None}),
    ):
        for name, value in found.items():
            if name not in names:
                raise SettingsError(f"{source} has an unknown setting {name!r}")
            values[name] = _convert(source, name, value)
    return Settings(**values)


def _from_file(config: Path | None, environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    named = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    path = named or Path(CONFIG_FILE)
    if named is None and not path.is_file():
        return str(path), {}
    try:
        return str(path), tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None


def _from_environment(environ: Mapping[str, str], names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        own: environ[foreign] for foreign, own in FOREIGN_VARIABLES.items() if environ.get(foreign)
    }
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable.startswith(TEST_PREFIX):
            continue
        if variable in (CONFIG_VARIABLE, WHEEL_VARIABLE):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in names:
            raise SettingsError(f"unknown variable {variable}: there is no setting of that name")
        if text:
            found[name] = text
    return found


def _convert(source: str, name: str, value: Any) -> Any:
    hint = get_type_hints(Settings, include_extras=True)[name]
    try:
        if value is None:
            raise msgspec.ValidationError("it has no value")
        converted = msgspec.convert(value, hint, strict=not isinstance(value, str), dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {name}: {error}") from None
    return _checked(source, name, converted)


_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("none", "int8", "int4"),
    "native": ("auto", "on", "off"),
    "export_mode": ("invoice", "meter"),
    "invoice_automation": ("off", "draft", "finalize", "export"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("auto", "json", "console"),
}

_URLS = {
    "ledger_url": (
        ("sqlite:///", "postgresql+psycopg://"),
        "sqlite:///path or postgresql+psycopg://user:password@host/database; other databases do not work",
    ),
    "alert_url": (("https://", "http://"), "http(s)://host/path"),
    "clickhouse_url": (
        ("chdb:///", "http://", "https://"),
        "chdb:///absolute/path or http(s)://user:password@host:port/database",
    ),
}
"""Setting → how its text may begin, and what it must be."""


def _checked(source: str, name: str, value: Any) -> Any:
    choices = _CHOICES.get(name)
    if choices and value not in choices:
        raise SettingsError(f"{source}: {name}: must be one of {', '.join(choices)}")
    if name in _URLS and not value.startswith(_URLS[name][0]):
        raise SettingsError(f"{source}: {name}: must be {_URLS[name][1]}")  # without the value: a password may be in it
    if name == "dunning_steps":
        try:
            parse_steps(value)
        except ValueError as error:
            raise SettingsError(f"{source}: {name}: {error}") from None
    if name in SECRETS and (not value.strip() or value != value.strip()):
        raise SettingsError(f"{source}: {name}: must not be blank or have spaces around it")
    return value


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    raise NotImplementedError(kind)
