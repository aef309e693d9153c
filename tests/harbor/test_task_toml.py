"""Every key of `task.toml`, with what is valid and what is not."""

from __future__ import annotations

import tomllib

import pytest
from hermes_harbor.task_toml import TaskToml, unknown_keys
from hermes_harbor.tasks import parse_task_toml

from hermes_core.errors import DatasetError


def parsed(text: str) -> TaskToml:
    return parse_task_toml(tomllib.loads(text), "task.toml")


VALID = {
    'version = "1.0"': lambda toml: toml.schema_version == "1.0",
    'schema_version = "1.1"\nversion = "1.0"': lambda toml: toml.schema_version == "1.1",
    "": lambda toml: (toml.schema_version, toml.verifier.timeout_sec, toml.agent.timeout_sec) == ("1.4", 600, None),
    '[task]\nname = "org/name"\nkeywords = ["a"]\nauthors = [{name = "n", email = "e"}]': lambda toml: (
        toml.task.authors[0].email == "e"
    ),
    '[metadata]\ndifficulty = "easy"\nanything = {at = ["all"]}': lambda toml: (
        toml.metadata["anything"] == {"at": ["all"]}
    ),
    'source = "somewhere"': lambda toml: toml.source == "somewhere",
    '[agent]\ntimeout_sec = 1.5\nuser = "agent"': lambda toml: (
        (toml.agent.timeout_sec, toml.agent.user) == (1.5, "agent")
    ),
    "[agent]\nuser = 1000": lambda toml: toml.agent.user == 1000,
    '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.Example.com.", "10.0.0.0/8", "::1", "fd00::/8"]': (
        lambda toml: toml.agent.allowed_hosts == ["*.example.com", "10.0.0.0/8", "::1", "fd00::/8"]
    ),
    '[verifier]\ntimeout_sec = 9\nuser = 0\nenv = {A = "b"}': lambda toml: toml.verifier.env == {"A": "b"},
    '[verifier]\nenvironment_mode = "separate"': lambda toml: toml.mode() == "separate",
    '[verifier.environment]\ndocker_image = "v"': lambda toml: toml.mode() == "separate",
    '[[verifier.collect]]\ncommand = "c"': lambda toml: toml.verifier.collect[0].timeout_sec == 60,
    '[environment]\nos = "LINUX"\ncpus = 0.5\nmemory_mb = 1\nstorage_mb = 2\ngpus = 1\ngpu_types = ["H100"]': (
        lambda toml: (toml.environment.os, toml.environment.cpus, toml.environment.gpus) == ("linux", 0.5, 1)
    ),
    '[environment]\nmemory = "2G"\nstorage = "512M"': lambda toml: (
        (toml.environment.memory_mb, toml.environment.storage_mb) == (2048, 512)
    ),
    '[environment]\nmemory = "2048K"\nmemory_mb = 2': lambda toml: toml.environment.memory_mb == 2,
    "[environment]\nallow_internet = false": lambda toml: toml.environment.network_mode == "no-network",
    '[environment]\nallow_internet = false\nnetwork_mode = "public"': lambda toml: (
        toml.environment.network_mode == "public"
    ),
    "[environment.healthcheck]\ncommand = 'true'": lambda toml: toml.environment.healthcheck.retries == 3,
    '[environment.tpu]\ntype = "v6e"\ntopology = "2x4"': lambda toml: toml.environment.tpu.topology == "2x4",
    '[[environment.mcp_servers]]\nname = "m"\ntransport = "http"\nurl = "http://x"\nheaders = {Authorization = '
    '"Bearer ${TOKEN}", Accept = "json"}': lambda toml: toml.environment.mcp_servers[0].transport == "streamable-http",
    '[[environment.mcp_servers]]\nname = "m"\ntransport = "stdio"\ncommand = "c"\nargs = ["a"]': lambda toml: (
        toml.environment.mcp_servers[0].args == ["a"]
    ),
    'artifacts = ["/logs/x", {source = "/y", destination = "y/z", exclude = ["*.o"]}]': lambda toml: (
        [each.source for each in toml.artifacts] == ["/logs/x", "/y"]
    ),
    '[solution]\nenv = {A = "${A:-b}"}': lambda toml: toml.solution.env == {"A": "${A:-b}"},
    'multi_step_reward_strategy = "final"\n[[steps]]\nname = "one"\nmin_reward = 0.5\n[[steps]]\nname = "two"\n'
    "min_reward = {reward = 1.0}\n[steps.verifier.environment]\n": lambda toml: (
        [toml.mode(step) for step in toml.steps] == ["shared", "separate"]
    ),
}


@pytest.mark.parametrize("text", VALID)
def test_valid_keys_are_read(text):
    assert VALID[text](parsed(text))


INVALID = {
    "version = 1.0": "schema_version",
    '[task]\nname = "name"': "ORGANIZATION/NAME",
    '[task]\nname = "org/../name"': "ORGANIZATION/NAME",
    '[task]\nname = "o/n"\nversion = ""': "task.version",
    "[task]\n": "task.name",
    "[agent]\ntimeout_sec = 0": "agent.timeout_sec",
    "[agent]\ntimeout_sec = nan": "agent.timeout_sec",
    '[agent]\nnetwork_mode = "some"': "agent.network_mode",
    '[agent]\nallowed_hosts = ["a.b"]': "allowlist",
    '[environment]\nallowed_hosts = ["a.b"]': "allowlist",
    '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["http://a.b"]': "host name",
    '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b:80"]': "host name",
    '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.*.b"]': "host name",
    '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.10.0.0.1"]': "host name",
    '[environment]\nos = "plan9"': "environment.os",
    '[environment]\nmemory = "2GB"': "such as '2G'",
    '[environment]\nmemory = "2G"\nmemory_mb = 1': "disagree",
    "[environment]\ncpus = 0": "environment.cpus",
    "[environment]\ncpus = inf": "environment.cpus",
    "[environment]\nmemory_mb = -1": "environment.memory_mb",
    "[environment.healthcheck]\nretries = 1": "healthcheck.command",
    "[environment.healthcheck]\ncommand = 'c'\nretries = 0": "healthcheck.retries",
    '[environment.tpu]\ntype = "v"\ntopology = "2"': "tpu.topology",
    '[[environment.mcp_servers]]\nname = "m"': "needs `url`",
    '[[environment.mcp_servers]]\nname = "m"\ntransport = "stdio"': "needs `command`",
    '[[environment.mcp_servers]]\nname = "m"\nurl = "u"\nheaders = {Authorization = "Bearer abc"}': "hold no secret",
    '[[environment.mcp_servers]]\nname = "m"\nurl = "u"\nheaders = {"a b" = "c"}': "no valid header",
    'artifacts = ["/a/../b"]': "'..'",
    'artifacts = [{source = "/a", destination = "/b"}]': "relative",
    'artifacts = [{source = "/a", destination = "manifest.json"}]': "reserved",
    'artifacts = [{source = "a", service = "db"}]': "absolute path",
    '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1': "exclude each other",
    '[[verifier.collect]]\ncommand = "c"\nservice = "a b"': "service",
    'multi_step_reward_strategy = "best"': "multi_step_reward_strategy",
    '[[steps]]\nname = "a/b"': "one directory",
    '[[steps]]\nname = "CON"': "one directory",
    '[[steps]]\nname = "a"\n[[steps]]\nname = "A"': "two steps",
}


@pytest.mark.parametrize("text", INVALID)
def test_invalid_keys_are_refused(text):
    with pytest.raises(DatasetError, match=INVALID[text]):
        parsed(text)


def test_every_schema_is_known():
    versions = ["0.1", "1.0", "1.4", "9.0", "draft"]
    assert [parsed(f'schema_version = "{version}"').schema_version for version in versions] == versions


def test_keys_without_a_meaning_are_found():
    table = tomllib.loads(
        'version = "1.0"\nfoo = 1\n[metadata]\nmine = 1\n[agent]\ntimeout_secs = 1\n[environment]\nmemory = "1G"\n'
        '[environment.env]\nA = "b"\n[verifier.environment]\ncpu = 1\n[[steps]]\nname = "a"\nbar = 1'
    )
    assert sorted(unknown_keys(TaskToml, table)) == [
        "agent.timeout_secs (did you mean 'timeout_sec'?)",
        "foo",
        "steps.bar",
        "verifier.environment.cpu (did you mean 'cpus'?)",
    ]
