"""Who may import whom: the rooms' borders, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gateway", "engine", "kernels", "metering", "billing", "migrations", "dashboards")
MAY_IMPORT = {
    "gateway": {"engine", "metering", "billing", "migrations", "kernels"},
    "engine": {"kernels"},
    "billing": {"metering"},
    "kernels": set(),
    "metering": set(),
    "migrations": set(),
    "dashboards": {"gateway", "metering"},  # at build time: the metric and column names come from the code
}
SOLE_IMPORTERS = {  # a library that stays behind one door
    "litestar": ("gateway/",),
    "torch": ("engine/", "kernels/"),
    "transformers": ("engine/",),
    "triton": ("kernels/",),
    "stripe": ("billing/stripe.py", "billing/stripe_calls.py", "billing/meters.py", "billing/webhooks.py"),
    "clickhouse_connect": ("metering/clickhouse.py", "migrations/runner.py"),
    "sqlalchemy": ("billing/", "migrations/"),
    "alembic": ("migrations/",),
}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Every absolute module name a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_the_rooms_it_may(room: str) -> None:
    allowed = MAY_IMPORT[room] | {room}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name in imported(path)
        if name.split(".")[0] in ROOMS and name.split(".")[0] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("library", SOLE_IMPORTERS)
def test_library_stays_behind_its_door(library: str) -> None:
    files = {str(path.relative_to(ROOT)) for path in sources() if library in {n.split(".")[0] for n in imported(path)}}
    assert files, f"nothing imports {library}: drop it from the list"
    assert not {file for file in files if not file.startswith(SOLE_IMPORTERS[library])}


def test_only_the_command_line_imports_the_composition_root() -> None:
    importers = {str(p.relative_to(ROOT)) for p in sources() if imported(p) & {"gateway.app", "gateway.lifecycle"}}
    assert importers - {"gateway/app.py", "gateway/lifecycle.py"} == {"gateway/commands/server.py"}


def test_the_check_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text("def f():\n    from billing.money import cost\n    import engine.types\n")
    assert imported(tmp_path / "probe.py") == {"billing.money", "billing.money.cost", "engine.types"}


def test_transformers_imports_from_the_root_beside_our_kernels_folder() -> None:
    """transformers probes for a package called `kernels`; ours must not break it."""
    assert not (ROOT / "kernels/__init__.py").read_text().strip()
    script = "import transformers, kernels; from transformers import LlamaForCausalLM; print(kernels.__file__)"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip().splitlines()[-1]) == ROOT / "kernels" / "__init__.py"
