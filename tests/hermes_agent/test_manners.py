"""What hermes-agent's users know besides commands is the same in slots."""

from __future__ import annotations

import json

import pytest

from .conftest import CONFIG, Home

pytestmark = pytest.mark.full


def test_interrupts_subagents_and_ends_of_sessions(home: Home, isolates: None, leak_check: None) -> None:
    found = home.results("manners.py", terminal="slots-local")
    interrupted = found["interrupted"]
    assert (interrupted["exit_code"], interrupted["left"]) == (130, ""), interrupted
    assert interrupted["output"] == "[Command interrupted]"
    assert interrupted["seconds"] < 100
    variables = found["variables"]
    assert variables["at_once"] == 6 * ["100000 a 'b'\nc"]
    assert variables["after"] == "unset unset 1 a 'b'\nc unset"
    assert len(variables["files"].split()) <= 6, "one for each command that ran at once"
    of_chat, of_helper, of_other = found["subagent"]
    assert of_helper == of_chat and of_chat.startswith("of-the-chat.txt")
    assert "No such file" in of_other
    assert found["ended"] == "", "another session's files are gone"
    told, again = found["lost"]
    assert told["exit_code"] == -1 and told["output"].startswith("[The sandbox failed: ")
    assert (again["exit_code"], again["output"]) == (0, "again")
    assert found["guarded"] == [True, False, True]


@pytest.mark.parametrize("broken", ["off", "misspelt"])
def test_without_the_plugin_or_the_backend_no_command_runs(home: Home, hermes_extra: None, broken: str) -> None:
    terminal = "slots-local"
    if broken == "off":
        home.configure(**{**CONFIG, "plugins": {"enabled": []}})
    else:
        terminal = "slots-dokcer"
    done = home.run("terminal.py", "touch ran", terminal=terminal)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert ("Unknown environment type" if broken == "off" else "The sandbox failed: unknown backend 'dokcer'") in error
    assert broken == "off" or "Traceback" not in done.stdout, "the model gets the reason, not our code"
    assert not (home.work / "ran").exists()


def test_a_missing_image_names_the_setting_of_hermes_agent(home: Home, docker_images: None) -> None:
    profiles = home.folder / "profiles.yaml"
    profiles.write_text("profiles: {default: {acquire_timeout_s: 2}}")
    variables = {"TERMINAL_DOCKER_IMAGE": "localhost:9/nothing:1", "TERMINAL_DOCKER_PROFILES_FILE": str(profiles)}
    done = home.run("terminal.py", "true", terminal="slots-docker", **variables)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert "`hermes config set terminal.docker_image NAME`" in error and "--backend" not in error, error
