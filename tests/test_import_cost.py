"""Importing is cheap: nothing heavy comes in before it is used, on the way to `--help` least of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = {
    *("openai", "httpx", "docker", "modal", "paramiko", "pyarrow", "datasets", "torch", "numpy"),
    *("atroposlib", "inspect_ai", "mcp", "openenv", "verifiers"),
}
"""Never before a backend, an agent or a dataset asks for them."""

PRINTING = {"rich", "yaml", "dotenv", "pygments"}
"""Only when something is printed or read."""

OURS = {
    "hermes_core.runtime",
    "hermes_core.plugins.manager",
    "hermes_core.sandbox.contract",
    "hermes_core.cli.rollouts",
}


def loaded(code: str, plugins: str = "") -> set[str]:
    """The modules that a fresh interpreter has after this code, with these plugins."""
    script = (
        f"import sys, json\ntry:\n    {code}\nexcept SystemExit:\n    pass\njson.dump(sorted(sys.modules), sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "HERMES_PLUGINS": plugins, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_importing_the_package_loads_nothing_but_itself() -> None:
    assert loaded("import hermes_core").isdisjoint(HEAVY | PRINTING | OURS | {"pydantic", "click", "pluggy", "asyncio"})


def test_what_a_plugin_imports_is_light() -> None:
    modules = loaded("from hermes_core.plugins.hookspecs import hookimpl")
    assert "pluggy" in modules
    assert modules.isdisjoint(HEAVY | PRINTING | OURS | {"pydantic", "click", "asyncio"})


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["-h"]])
def test_help_loads_click_and_nothing_else(arguments: list[str]) -> None:
    modules = loaded(f"from hermes_core.cli.main import main; main({arguments!r})")
    assert "click" in modules
    assert modules.isdisjoint(HEAVY | PRINTING | OURS | {"pydantic", "pluggy", "asyncio"})


def test_a_runtime_loads_no_sdk() -> None:
    modules = loaded("from hermes_core.runtime import Runtime; Runtime().tools.names()")
    assert "hermes_core.tools.terminal" in modules
    assert modules.isdisjoint(HEAVY | PRINTING)


@pytest.mark.few(1)
@pytest.mark.entry_points
@pytest.mark.parametrize("command", ["plugins", "backends", "envs", "tools"])
def test_listing_installed_plugins_loads_no_sdk(command: str) -> None:
    modules = loaded(f"from hermes_core.cli.main import main; main([{command!r}, '--json'])")
    assert modules.isdisjoint(HEAVY)


def test_a_mistyped_environment_is_told_before_atropos_is_loaded() -> None:
    modules = loaded("from hermes_core.cli.main import main; main(['atropos', 'process', 'tsks'])", "atropos")
    assert "hermes_atropos.cli" in modules
    assert "atroposlib" not in modules
