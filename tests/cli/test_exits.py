"""Exit codes: one for each kind of error, whichever command meets it."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hermes_core import errors
from hermes_core.cli import exits
from hermes_core.cli.main import main
from hermes_core.cli.sandboxes import Census, FoundSandbox, Reaped
from hermes_core.sandbox.contract import SandboxInfo, SandboxStatus
from hermes_core.sandbox.local.backend import LocalBackend

CODES = {
    errors.ConfigError("x"): 2,
    errors.UnknownNameError("backend", "x", ()): 2,
    errors.DatasetError("x"): 2,
    errors.PolicyError("x"): 2,
    errors.ProvisionError("x"): 3,
    errors.ModelError("x"): 3,
    errors.OutputError("x"): 3,
    errors.PluginError("x"): 1,
    errors.VerifierError("x"): 1,
}


@pytest.mark.parametrize(("error", "code"), CODES.items(), ids=lambda value: type(value).__name__)
def test_a_command_that_ends_with_an_error(monkeypatch, error, code):
    async def fails(self, owner=None):
        raise error

    assert exits.exit_code(error) == code
    monkeypatch.setattr("hermes_core.cli.sandboxes.find", lambda *_: fails(None))
    done = CliRunner().invoke(main, ["ps", "local"])
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")


def test_a_backend_that_does_not_answer_is_no_wrong_use(monkeypatch):
    async def fails(self, owner=None):
        raise errors.InfraError("out of reach")

    monkeypatch.setattr(LocalBackend, "list", fails)
    done = CliRunner().invoke(main, ["ps", "local"])
    assert (done.exit_code, "backend 'local' did not answer: out of reach" in done.stderr) == (3, True)


def test_a_sandbox_that_can_not_be_ended(monkeypatch):
    found = FoundSandbox("local", SandboxInfo("box", "me", "id", 0.0, SandboxStatus.RUNNING))

    async def find(*_):
        return Census((found,), {})

    async def reap(*_, **__):
        return [Reaped(found, "failed", "it was not gone within 60 s")]

    monkeypatch.setattr("hermes_core.cli.sandboxes.find", find)
    monkeypatch.setattr("hermes_core.cli.sandboxes.reap", reap)
    assert CliRunner().invoke(main, ["reap", "--owner", "me"]).exit_code == 3


def test_the_table_in_the_docs_has_every_code():
    page = (Path(__file__).parents[2] / "docs/reference/configuration.md").read_text().split("## Exit codes")[1]
    codes = {value for name, value in vars(exits).items() if name.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)} == codes | {0}
