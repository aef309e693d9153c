"""Task folders: what is read, and why a task is refused before any sandbox is made."""

from __future__ import annotations

import tomllib

import pytest
from hermes_harbor.config import HarborConfig
from hermes_harbor.environment import HarborEnvironment
from hermes_harbor.networks import plan_network
from hermes_harbor.tasks import load_task, parse_task_toml, strip_canary
from hermes_harbor.variables import resolve_variables

from hermes_core.errors import DatasetError
from hermes_core.sandbox.commands import Cwd
from hermes_core.sandbox.contract import Network, NetworkPlan, NetworkPolicy
from hermes_core.sandbox.images import ImageBuild
from tests.harbor.harbor_tasks import write_task


def environment(folder, **config):
    return HarborEnvironment(HarborConfig(dataset_name=str(folder), **config))


async def set_up(folder, **config):
    made = environment(folder, **config)
    await made.setup()
    return made


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("Do it.\n", "Do it.\n"),
        ("<!-- harbor-canary GUID 1 -->\n# CANARY 2\n\n\nDo it.", "Do it."),
        ("\n\nDo it.", "Do it."),
        ("# Title\nabout a canary\n", "# Title\nabout a canary\n"),
        ("Do it.\n<!-- canary -->", "Do it.\n<!-- canary -->"),
        ("# canary", ""),
    ],
)
def test_canary_lines_are_not_shown(text, seen):
    assert strip_canary(text) == seen


def test_variables_of_the_host(monkeypatch):
    monkeypatch.setenv("SET", "value")
    monkeypatch.delenv("UNSET", raising=False)
    given = {"a": "${SET}", "b": "${UNSET:-default}", "c": "${UNSET:-}", "d": "literal $SET", "e": "${SET:-x}"}
    assert resolve_variables(given, "here") == {
        "a": "value",
        "b": "default",
        "c": "",
        "d": "literal $SET",
        "e": "value",
    }
    with pytest.raises(DatasetError, match=r"here: f: \$\{UNSET\} is not set here"):
        resolve_variables({"f": "${UNSET}"}, "here")


def test_what_a_task_says(tmp_path):
    toml = """
    [task]
    name = "org/one"
    [agent]
    timeout_sec = 30
    [environment]
    env = {A = "${NOT_SET_ANYWHERE:-a}"}
    """.replace("    ", "")
    task = load_task(write_task(tmp_path / "one", toml), HarborConfig(dataset_name="x"))
    assert (task.id, task.workdir, task.variables) == ("org/one", "/app", {"A": "a"})
    assert [part.instruction for part in task.parts] == ["Write hello to /app/out.\n"]


async def test_one_folder_and_a_folder_of_folders(tmp_path):
    for name in ("b", "a"):
        write_task(tmp_path / name)
    (tmp_path / "no task").mkdir()
    assert [item["id"] for item in (await set_up(tmp_path)).items()] == ["a", "b"]
    assert [item["id"] for item in (await set_up(tmp_path / "b")).items()] == ["b"]
    for path in (tmp_path / "no task", tmp_path / "nowhere"):
        with pytest.raises(DatasetError, match=r"no task|no folder"):
            await set_up(path)
    write_task(tmp_path / "c", '[task]\nname = "o/same"')
    write_task(tmp_path / "d", '[task]\nname = "o/same"')
    with pytest.raises(DatasetError, match=r"'o/same' is there twice"):
        await set_up(tmp_path)


async def test_what_can_t_run_here_is_refused_at_load_or_left_out(tmp_path, caplog):
    write_task(tmp_path / "bad", '[environment]\nos = "windows"')
    with pytest.raises(DatasetError, match=r"task 'bad' can't run here: .*sandboxes are Linux") as refused:
        await set_up(tmp_path)
    assert str(refused.value).count("skip_refused=true") == 1
    with pytest.raises(DatasetError, match=r"nothing to do .* 1 of 1 can't be used: task 'bad'"):
        await set_up(tmp_path, skip_refused=True)
    write_task(tmp_path / "good")
    assert [item["id"] for item in (await set_up(tmp_path, skip_refused=True)).items()] == ["good"]
    assert "left out (skip_refused): 1 of 2 can't be used: task 'bad'" in caplog.text


DOCKERFILE = {"environment/Dockerfile": "FROM x\n"}


async def test_which_image_a_task_gets(tmp_path):
    write_task(tmp_path / "a", "[environment]\nbuild_timeout_sec = 9", image=None, files=DOCKERFILE)
    write_task(tmp_path / "b", image="own", files=DOCKERFILE)
    built = ImageBuild(tmp_path / "a/environment", timeout_s=9)

    async def images(**config):
        made = await set_up(tmp_path, **config)
        return [made.image(item) for item in made.items()]

    assert await images() == [built, "own"]
    assert await images(image="given") == ["given", "own"]
    assert await images(force_build=True) == [built, ImageBuild(tmp_path / "b/environment")]
    made = await set_up(tmp_path)
    assert [item["image"] for item in made.items()] == [None, "own"]
    assert [made.cwd(item) for item in made.items()] == [Cwd.IMAGE] * 2
    made = await set_up(tmp_path, workdir="/srv")
    assert [made.cwd(item) for item in made.items()] == ["/srv"] * 2


async def test_a_task_without_an_image(tmp_path):
    write_task(tmp_path / "a", image=None)
    with pytest.raises(DatasetError, match=r"has no environment/Dockerfile, and names no environment\.docker_image"):
        await set_up(tmp_path)
    write_task(tmp_path / "a", image="own")
    with pytest.raises(DatasetError, match="has no environment/Dockerfile"):
        await set_up(tmp_path, force_build=True)


async def test_a_dockerfile_behind_a_link_is_none(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/Dockerfile").write_text("FROM x\n")
    task = write_task(tmp_path / "tasks/a", image=None)
    (task / "environment").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatasetError, match="leads out of its task"):
        await set_up(tmp_path / "tasks")
    (task / "environment").unlink()
    (task / "environment").mkdir()
    (task / "environment/Dockerfile").symlink_to(tmp_path / "elsewhere/Dockerfile")
    with pytest.raises(DatasetError, match="leads out of its task"):
        await set_up(tmp_path / "tasks")
    (task / "environment/Dockerfile").unlink()
    (task / "environment/Dockerfile").symlink_to("../task.toml")
    with pytest.raises(DatasetError, match="has no environment/Dockerfile"):
        await set_up(tmp_path / "tasks")


async def test_an_instruction_that_is_no_text(tmp_path):
    (write_task(tmp_path / "bad") / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(DatasetError, match="UTF-8"):
        await set_up(tmp_path)


async def test_an_items_content_is_all_of_its_folder(tmp_path):
    folder = write_task(tmp_path / "a")

    async def content():
        (item,) = (await set_up(tmp_path)).items()
        return item["content"]

    seen = [await content()]
    for name in ("tests/test.sh", "solution/solve.sh", "task.toml", "environment/Dockerfile", "tests/more.py"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + "\n# another\n")
        seen.append(await content())
    (folder / "tests/test.sh").chmod(0o755)
    seen.append(await content())
    assert len({*seen}) == len(seen) and await content() == seen[-1]


async def test_a_folder_that_lacks_its_task_toml_is_named(tmp_path, caplog):
    for name in "ab":
        write_task(tmp_path / name, "")
    (tmp_path / "b/task.toml").unlink()
    assert [item["id"] for item in (await set_up(tmp_path)).items()] == ["a"]
    assert [each.getMessage() for each in caplog.records] == [f"{tmp_path / 'b'} is no task, as it has no task.toml"]


async def test_keys_without_a_meaning_are_logged(tmp_path, caplog):
    write_task(tmp_path / "a", "[agent]\ntimeout_secs = 1")
    await set_up(tmp_path)
    assert "keys without a meaning: agent.timeout_secs (did you mean 'timeout_sec'?)" in caplog.text


MCP = """
[environment]
[[environment.mcp_servers]]
name = "{name}"
{rest}
"""


async def test_mcp_servers_are_programs_of_the_sandbox_or_replaced_by_the_run(tmp_path):
    stdio = MCP.format(name="notes", rest='transport = "stdio"\ncommand = "notes"\nargs = ["-v"]')
    made = await set_up(write_task(tmp_path / "stdio", stdio))
    servers = made.mcp_servers(made.items()[0])
    assert {name: (each.command, each.args, each.on_driver) for name, each in servers.items()} == {
        "notes": ("notes", ("-v",), False)
    }
    url = write_task(tmp_path / "url", MCP.format(name="web", rest='url = "http://mcp:8000/sse"'))
    with pytest.raises(DatasetError, match=r"'web' at a URL.*--mcp FILE"):
        await set_up(url)
    accepted = await set_up(url, accept=("mcp_urls",))
    assert accepted.mcp_servers(accepted.items()[0])["web"].on_driver


NONE = NetworkPolicy(network=Network.NONE)
PUBLIC = NetworkPolicy(allowed_hosts=("*:*", "0.0.0.0/0:*", "[::/0]:*"))
ALLOWLIST = 'network_mode = "allowlist"\nallowed_hosts = ["A.org", "::1"]'
LISTED = NetworkPolicy(allowed_hosts=("a.org:*", "[::1]:*"))


@pytest.mark.parametrize(
    ("toml", "network"),
    [
        ("", None),
        ('[agent]\nnetwork_mode = "public"', None),
        ('[environment]\nnetwork_mode = "no-network"', Network.NONE),
        ('[environment]\nnetwork_mode = "allowlist"', Network.NONE),
        (f"[environment]\n{ALLOWLIST}", NetworkPlan(LISTED, LISTED, LISTED)),
        (f"[agent]\n{ALLOWLIST}", NetworkPlan(PUBLIC, LISTED, PUBLIC)),
        ('[agent]\nnetwork_mode = "no-network"', NetworkPlan(PUBLIC, NONE, PUBLIC)),
        (f'[environment]\nnetwork_mode = "no-network"\n[verifier]\n{ALLOWLIST}', NetworkPlan(NONE, NONE, LISTED)),
        (f"[environment]\n{ALLOWLIST}\n[verifier.environment]", NetworkPlan(LISTED, LISTED, PUBLIC)),
        (f"[verifier.environment]\n{ALLOWLIST}", NetworkPlan(PUBLIC, PUBLIC, LISTED)),
        (f'[verifier]\nnetwork_mode = "no-network"\n[verifier.environment]\n{ALLOWLIST}',
         NetworkPlan(PUBLIC, PUBLIC, NONE)),
    ],
)  # fmt: skip
def test_each_phase_has_the_network_that_the_task_demands(toml: str, network: object) -> None:
    assert plan_network(parse_task_toml(tomllib.loads(toml), "task.toml")) == network


async def test_tasks_without_a_network_ask_for_none_and_share_what_is_equal(tmp_path):
    for name, toml in {"a": "", "b": '[environment]\nnetwork_mode = "no-network"'}.items():
        write_task(tmp_path / name, toml)
    for accept, networks in (([], [None, Network.NONE]), (["network"], [None, None])):
        made = await set_up(tmp_path, accept=accept)
        assert [made.network(item) for item in made.items()] == networks
