"""What the root README says of the settings and the rooms is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.settings import Field, fields

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def default_text(field: Field) -> str:
    if field.default is None:
        return ""
    if field.name == "cache_dir":
        return "`~/.cache/meterhouse`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def settings_table() -> str:
    rows = [f"| `{field.name}` | {default_text(field)} | {field.description} |" for field in fields()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def test_every_setting_is_in_the_table_as_the_code_has_it() -> None:
    found = re.search(r"<!-- settings -->\n(.*)\n<!-- /settings -->", README.read_text(), re.DOTALL)
    assert found
    assert found[1] == settings_table()


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]
