"""Task folders that cover the format of Harbor: every key, and everything that can be wrong with it or not run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.harbor.harbor_tasks import BUSYBOX, PYTHON, TEST, write_task

TESTS_INSIDE = "hermes-test-harbor-tests:latest"
"""An image that has its own tests, which `images` of the conftest builds."""

REWARD = "/logs/verifier/reward"


def scored(check: str) -> str:
    """Return tests that pass if a shell condition is true."""
    return f"if {check}; then echo 1 >{REWARD}.txt; else echo 0 >{REWARD}.txt; fi\n"


def step(name: str, *, files: Mapping[str, str] | None = None, test: str | None = None) -> dict[str, str]:
    """Return the files of a step that asks for a file with the step's name in it."""
    usual = scored(f"grep -qx {name} /app/{name}")
    parts = {
        "instruction.md": f"# canary\n\nWrite {name} to /app/{name}.\n",
        "tests/test.sh": f"#!/bin/sh\n{usual if test is None else test}",
        "solution/solve.sh": f"#!/bin/sh\necho {name} >/app/{name}\n",
        **(files or {}),
    }
    return {f"steps/{name}/{path}": text for path, text in parts.items()}


@dataclass(frozen=True)
class Folder:
    """A task folder, and what becomes of it."""

    toml: str = ""
    is_: Literal["run", "loaded", "refused", "wrong"] = "loaded"
    """`refused` is valid and can't run here, `wrong` is not valid. What is run has a solution that solves it."""
    reason: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `write_task`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    harbor: bool | None = None
    """Whether Harbor takes it, if that differs: there are limits that it does not check, or checks when it runs."""

    @property
    def taken_by_harbor(self) -> bool:
        """Return whether Harbor takes the folder."""
        return self.is_ != "wrong" if self.harbor is None else self.harbor

    def write(self, folder: Path) -> Path:
        """Write the folder."""
        write_task(folder, self.toml, files=self.files, **self.written)
        for name, target in self.links.items():
            (folder / name).symlink_to(target)
        return folder


STEPS: Mapping[str, Any] = {"instruction": None, "test": None, "solve": None}

FOLDERS: Mapping[str, Folder] = {
    # --- run: the solution scores 1.0, and nothing 0.0
    "plain": Folder('version = "1.0"', "run"),
    "status of the tests": Folder('schema_version = "1.1"', "run", written={"test": TEST + "exit 7\n"}),
    "python": Folder('schema_version = "1.2"\nsource = "here"', "run", written={"image": PYTHON}),
    "variables": Folder(
        """
schema_version = "1.3"
[environment]
workdir = "/srv/work"
env = {GREETING = "${NOT_SET_ANYWHERE:-hello}"}
[verifier]
timeout_sec = 60
env = {WANTED = "hello you"}
[solution]
env = {WHOM = "${NOT_SET_ANYWHERE:-you}"}
""",
        "run",
        written={
            "solve": 'echo "$GREETING $WHOM" >out\n',
            "test": scored('grep -qx "$WANTED" /srv/work/out'),
        },
    ),
    "user of the tests": Folder(
        '[verifier]\nuser = "nobody"',
        "run",
        written={"image": PYTHON, "test": '[ "$(id -un)" = nobody ] || exit\n' + TEST},
    ),
    "rewards by name": Folder(
        "",
        "run",
        written={
            "test": TEST
            + f'echo "{{\\"reward\\": $(cat {REWARD}.txt), \\"speed\\": 0.5}}" >{REWARD}.json\n'
            + f"echo 0.5 >{REWARD}.txt\n"
        },
    ),
    "healthcheck": Folder(
        """
[environment.healthcheck]
command = "[ -f /tmp/seen ] || { touch /tmp/seen; false; }"
interval_sec = 0.1
timeout_sec = 10
start_period_sec = 0
start_interval_sec = 0.1
retries = 2
""",
        "run",
    ),
    "old keys": Folder('[environment]\nmemory = "512M"\nstorage = "1G"\nallow_internet = true', "run"),
    "steps": Folder(
        """
multi_step_reward_strategy = "mean"
[agent]
timeout_sec = 60
[verifier]
env = {A = "task"}
[[steps]]
name = "one"
min_reward = 1.0
[[steps]]
name = "two"
min_reward = {reward = 0.5}
artifacts = ["two"]
[steps.agent]
timeout_sec = 30
[steps.verifier]
env = {B = "step"}
timeout_sec = 30
[steps.healthcheck]
command = "grep -q ready /app/ready"
interval_sec = 0.1
[[steps]]
name = "three"
""",
        "run",
        files={
            **step("one"),
            **step(
                "two",
                files={
                    "workdir/setup.sh": "#!/bin/sh\n[ ! -e /tests ] && [ ! -e /solution ] && cp given ready\n",
                    "workdir/given": "ready\n",
                },
                test='[ "$A$B" = taskstep ] && [ -f /app/one ] && . /tests/shared.sh\n',
            ),
            "tests/shared.sh": scored("grep -qx two /app/two"),
            "tests/test.sh": "echo nobody calls me\n",
            **step("three"),
        },
        written=STEPS,
    ),
    "last step": Folder(
        'multi_step_reward_strategy = "final"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n',
        "run",
        files={**step("one", test=f"echo 0 >{REWARD}.txt\n"), **step("two")},
        written=STEPS,
    ),
    "separate tests": Folder(
        """
artifacts = ["/app/out", {source = "data", destination = "kept/data", exclude = ["*.o", "cache"]}]
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "echo hello >>/app/out; [ $(id -un) = root ]"
timeout_sec = 20
[[verifier.collect]]
command = "id -un >/app/data/user"
service = "main"
user = "daemon"
""",
        "run",
        written={
            "image": PYTHON,
            "solve": "mkdir -p data/cache; chmod 777 data; cd data; touch a.c a.o cache/x ../other; ln -s a.c l\n",
            "test": scored(
                '[ "$(cat /app/out)" = hello ] && [ "$(cd /app/data && echo *)" = "a.c l user" ] '
                '&& [ ! -e /app/other ] && [ "$(readlink /app/data/l)" = a.c ] && grep -qx daemon /app/data/user'
            ),
        },
    ),
    "image of the tests": Folder(
        f"""
artifacts = ["out"]
[environment]
workdir = "/app"
[verifier.environment]
docker_image = "{TESTS_INSIDE}"
workdir = "/checks"
env = {{WANTED = "${{NOT_SET_ANYWHERE:-hello}}"}}
build_timeout_sec = 100
""",
        "run",
        written={"test": None},
    ),
    "Dockerfile of the tests": Folder(
        'artifacts = ["out"]\n[verifier]\nenvironment_mode = "separate"\n',
        "run",
        files={"tests/Dockerfile": f"FROM {BUSYBOX}\nWORKDIR /inside\nCOPY test.sh /tests/test.sh\n"},
        written={"test": scored('[ "$(pwd)" = /inside ] && grep -qx hello /app/out')},
    ),
    "separate steps": Folder(
        """
[verifier]
environment_mode = "separate"
[[steps]]
name = "one"
artifacts = ["one"]
[[steps]]
name = "two"
artifacts = ["two"]
[steps.verifier]
environment_mode = "shared"
[[steps.verifier.collect]]
command = "true"
""",
        "run",
        files={**step("one"), **step("two")},
        written=STEPS,
    ),
    # --- loaded
    "everything about it": Folder(
        """
schema_version = "1.4"
[task]
name = "org/a.task"
version = "1.2.3"
description = "What it is"
authors = [{name = "One", email = "one@example.com"}, {name = "Two"}]
keywords = ["a", "b"]
[metadata]
difficulty = "easy"
anything = {at = ["all", 1]}
[environment]
cpus = 0.5
memory_mb = 512
storage_mb = 1024
gpus = 0
skills_dir = "/skills"
os = "LINUX"
"""
    ),
    "whole processors": Folder("[environment]\ncpus = 2.0\nbuild_timeout_sec = 30"),
    "both sizes": Folder('[environment]\nmemory = "2048K"\nmemory_mb = 2'),
    "no internet": Folder(
        '[environment]\nallow_internet = false\n[agent]\nnetwork_mode = "no-network"',
        "run",
        written={"test": '[ "$(grep -c : /proc/net/dev)" = 1 ] || exit\n' + TEST},
    ),
    "no internet, accepted": Folder("[environment]\nallow_internet = false", config={"accept": ["network"]}),
    "allowed hosts": Folder(
        """
[environment]
network_mode = "allowlist"
allowed_hosts = ["*.Example.com.", "10.0.0.0/8", "::1"]
[agent]
network_mode = "allowlist"
allowed_hosts = ["a.example.com"]
[verifier]
network_mode = "allowlist"
allowed_hosts = ["192.0.2.1"]
""",
        "run",
        written={"test": '[ "$(grep -c : /proc/net/dev)" = 1 ] && [ -n "$HTTPS_PROXY" ] || exit\n' + TEST},
    ),
    "allowed hosts, accepted": Folder(
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]', config={"accept": ["network"]}
    ),
    "gpus, accepted": Folder('[environment]\ngpus = 1\ngpu_types = ["H100"]', config={"accept": ["gpus"]}),
    "another user": Folder('[agent]\nuser = "me"'),
    "a user by number": Folder("[agent]\nuser = 0\n[verifier]\nuser = 65534"),
    "another image": Folder("", written={"image": None}, config={"image": BUSYBOX}),
    "a working directory of its Dockerfile": Folder(
        "", files={"environment/Dockerfile": "FROM x\nWORKDIR /srv\nWORKDIR sub\n"}
    ),
    "tools of a program": Folder(
        '[[environment.mcp_servers]]\nname = "m"\ntransport = "stdio"\ncommand = "c"\nargs = ["a", "b"]'
    ),
    "tools at a url, accepted": Folder(
        '[[environment.mcp_servers]]\nname = "m"\ntransport = "http"\nurl = "http://x"\n'
        'headers = {Authorization = "Bearer ${TOKEN}", Accept = "json"}',
        config={"accept": ["mcp_urls"]},
    ),
    "no step": Folder("steps = []"),
    "a version of its own": Folder('version = "0.1"'),
    "compose for what its Dockerfile makes": Folder(
        "",
        files={
            "environment/Dockerfile": "FROM x\nCOPY docker-compose.yml /app/\n",
            "environment/docker-compose.yml": "services: {}",
        },
    ),
    "keys of tomorrow": Folder("tomorrow = 1\n[agent]\ntimeout_secs = 1"),
    "a link in the task": Folder("", links={"tests/helper.sh": "test.sh"}),
    "a link out of the image's files": Folder(
        "", files={"environment/Dockerfile": "FROM x\n"}, links={"environment/zone": "/etc/localtime"}
    ),
    # --- refused
    "windows": Folder('[environment]\nos = "windows"', "refused", "sandboxes are Linux", files={"tests/test.bat": ""}),
    "windows for the tests": Folder(
        '[verifier.environment]\nos = "windows"', "refused", "sandboxes are Linux", files={"tests/test.bat": ""}
    ),
    "a tpu": Folder('[environment.tpu]\ntype = "v6e"\ntopology = "2x4"', "refused", "TPU"),
    "gpus": Folder("[environment]\ngpus = 1", "refused", "accept gpus"),
    "gpus of the tests of a step": Folder(
        '[[steps]]\nname = "one"\n[steps.verifier.environment]\ngpus = 1',
        "refused",
        "step 'one', verifier.environment.gpus",
        files=step("one"),
        written=STEPS,
    ),
    "compose": Folder("", "refused", "several containers", files={"environment/docker-compose.yaml": "services: {}"}),
    "singularity": Folder("", "refused", "several containers", files={"environment/singularity-compose.yaml": ""}),
    "compose for the tests": Folder(
        "", "refused", "tests/docker-compose.yaml asks", files={"tests/docker-compose.yaml": ""}
    ),
    "compose for the tests of a step": Folder(
        '[[steps]]\nname = "one"',
        "refused",
        "steps/one/tests/docker-compose.yaml asks",
        files={**step("one"), "steps/one/tests/docker-compose.yaml": ""},
        written=STEPS,
    ),
    "an artifact of a service": Folder(
        'artifacts = [{source = "/x", service = "db"}]', "refused", "service 'db' of another container"
    ),
    "a command in a service": Folder(
        '[[verifier.collect]]\ncommand = "c"\nservice = "db"', "refused", "service 'db' of another container"
    ),
    "no network for the agent": Folder('[agent]\nnetwork_mode = "no-network"'),
    "a network for the tests alone": Folder(
        '[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = "public"',
        "run",
        written={"test": '[ -n "$HTTPS_PROXY" ] || exit\n' + TEST},
    ),
    "no network for the tests of a step": Folder(
        '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n[steps.verifier]\nnetwork_mode = "no-network"',
        "refused",
        "the network of the verifier is not the same in all steps",
        files={**step("one"), **step("two")},
        written=STEPS,
    ),
    "another user in one of the steps": Folder(
        '[agent]\nuser = "me"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n[steps.agent]\nuser = "you"',
        "refused",
        "an agent stays one user",
        files={**step("one"), **step("two")},
        written=STEPS,
    ),
    "tools at a url": Folder(
        '[[environment.mcp_servers]]\nname = "m"\nurl = "http://x"', "refused", "accept mcp_urls"
    ),
    "another user in a step": Folder(
        '[[steps]]\nname = "one"\n[steps.agent]\nuser = 1000', files=step("one"), written=STEPS
    ),
    "an earlier conversation": Folder("", "refused", "trajectory.json is an earlier", files={"trajectory.json": "{}"}),
    "an earlier conversation of a step": Folder(
        '[[steps]]\nname = "one"',
        "refused",
        "steps/one/trajectory.json is an earlier",
        files={**step("one"), "steps/one/trajectory.json": "{}"},
        written=STEPS,
    ),
    # --- wrong
    "no toml": Folder("[agent\n", "wrong", "not TOML"),
    "no time": Folder('[agent]\ntimeout_sec = "long"', "wrong", "key 'agent.timeout_sec'"),
    "no seconds": Folder("[agent]\ntimeout_sec = 0", "wrong", "key 'agent.timeout_sec'", harbor=True),
    "no retries": Folder(
        "[environment.healthcheck]\ncommand = 'c'\nretries = 0", "wrong", "healthcheck.retries", harbor=True
    ),
    "no variable": Folder(
        '[environment]\nenv = {A = "${NOT_SET_ANYWHERE}"}', "wrong", "environment.env: A: .* not set here", harbor=True
    ),
    "no instruction": Folder("", "wrong", "has no instruction.md", written={"instruction": None}),
    "no tests": Folder("", "wrong", "has no tests/test.sh", written={"test": None}),
    "no tests for a separate sandbox": Folder(
        '[verifier]\nenvironment_mode = "separate"', "wrong", "has no tests/test.sh", written={"test": None}
    ),
    "no folder of a step": Folder('[[steps]]\nname = "one"', "wrong", "has no steps/one/instruction.md"),
    "no tests of a step": Folder(
        '[[steps]]\nname = "one"',
        "wrong",
        "has no steps/one/tests/test.sh",
        files={"steps/one/instruction.md": "Do it."},
        written=STEPS,
    ),
    "two steps of one name": Folder('[[steps]]\nname = "a"\n[[steps]]\nname = "A"', "wrong", "two steps"),
    "a step elsewhere": Folder('[[steps]]\nname = "../a"', "wrong", "one directory"),
    "no strategy": Folder('multi_step_reward_strategy = "best"', "wrong", "multi_step_reward_strategy"),
    "no number to pass": Folder('[[steps]]\nname = "a"\nmin_reward = "most"', "wrong", "min_reward"),
    "shared and apart": Folder(
        '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1', "wrong", "exclude each other"
    ),
    "an artifact above": Folder('artifacts = ["/a/../b"]', "wrong", "'..'"),
    "an artifact kept elsewhere": Folder('artifacts = [{source = "/a", destination = "/b"}]', "wrong", "relative"),
    "a size without a unit": Folder('[environment]\nmemory = "2GB"', "wrong", "such as '2G'"),
    "two sizes": Folder('[environment]\nmemory = "2G"\nmemory_mb = 1', "wrong", "disagree"),
    "hosts without a list": Folder('[agent]\nallowed_hosts = ["a.b"]', "wrong", "allowlist"),
    "a name without an organization": Folder('[task]\nname = "name"', "wrong", "ORGANIZATION/NAME"),
    "tools of nothing": Folder(
        '[[environment.mcp_servers]]\nname = "m"\ntransport = "stdio"', "wrong", "needs `command`"
    ),
    "a secret": Folder(
        '[[environment.mcp_servers]]\nname = "m"\nurl = "u"\nheaders = {Authorization = "Bearer abc"}',
        "wrong",
        "hold no secret",
    ),
    "a solution elsewhere": Folder("", "wrong", "leads out of its task", links={"solution/more": "/etc"}),
    "tests elsewhere": Folder(
        "", "wrong", "leads out of its task", links={"tests": "/etc"}, written={"test": None}
    ),
    "an instruction elsewhere": Folder(
        "", "wrong", "leads out of its task", links={"instruction.md": "/etc/hostname"}, written={"instruction": None},
        harbor=True,
    ),
}  # fmt: skip
