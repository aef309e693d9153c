"""What your test sees of the developer's machine: no settings, no keys, no installed plugins, the usual signals.

Variables `HERMES_…` and `OPENAI_…` are unset in each test, but for `KEPT`. Plugins that are installed here are not
loaded; `@pytest.mark.entry_points` loads them.
"""

from __future__ import annotations

import os
import signal

import pytest

KEPT = (
    *("HERMES_REQUIRE", "HERMES_TEST_PYTHONS", "HERMES_SWE_TASKS", "HERMES_TEST_SSH_CONFIG", "HERMES_TEST_SLURM"),
    "HERMES_VLLM",
)
"""The variables of ours that tests do see: what has to be there, and where it is."""

# A script's background jobs ignore the one, and what `nohup` starts the other. So would the programs of the tests.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "entry_points: loads the plugins that are installed here")


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the developer's settings, keys or installed plugins (unless marked `entry_points`)."""
    for name in os.environ:
        if name.startswith(("HERMES_", "OPENAI_")) and name not in KEPT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HERMES_ENV_FILE", "")
    if request.node.get_closest_marker("entry_points") is None:
        monkeypatch.setenv("HERMES_PLUGINS", "")


@pytest.fixture
def program_agents(isolates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents can be programs: the plugin that runs them is used, and slots are isolated from each other."""
    monkeypatch.setenv("HERMES_PLUGINS", "agents")
