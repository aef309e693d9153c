"""Datasets in git repositories: refs, folders, the cache, and what a stranger's repository must not do."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from pathlib import Path

import pytest
from hermes_harbor.config import HarborConfig
from hermes_harbor.environment import HarborEnvironment
from hermes_harbor.repository import repository_of

from hermes_core.errors import DatasetError
from tests.harbor.harbor_tasks import write_task

WHO = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *WHO, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, name: str) -> str:
    """Add a task to a repository and return the commit."""
    write_task(folder / "tasks" / name)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", name)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def origin(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "one")
    return folder


async def ids(tmp_path: Path, name: str, **config) -> list[str]:
    made = HarborEnvironment(HarborConfig(dataset_name=name, cache_dir=str(tmp_path / "cache"), **config))
    await made.setup()
    return [item["id"] for item in made.items()]


async def test_refs_and_folders(tmp_path, origin):
    first = git(origin, "rev-parse", "HEAD")
    git(origin, "tag", "-am", "first", "v1")
    git(origin, "checkout", "-qb", "feature/more")
    second = commit(origin, "two")
    git(origin, "checkout", "-q", "main")
    url = f"file://{origin}"
    for name, found in {
        f"{url}#:tasks": ["one"],
        f"{url}#v1:tasks": ["one"],
        f"{url}@v1:tasks": ["one"],
        f"{url}#{first}:tasks/one": ["one"],
        f"{url}#feature/more:tasks": ["one", "two"],
        f"{url}@{second}:tasks": ["one", "two"],
    }.items():
        assert await ids(tmp_path, name) == found, name
    assert sorted(each.name for each in (tmp_path / "cache").glob("*/*")) == sorted([first, second])


async def test_a_branch_that_moves_is_fetched_again_and_a_commit_only_once(tmp_path, origin):
    first, name = git(origin, "rev-parse", "HEAD"), f"file://{origin}#main:tasks"
    assert await ids(tmp_path, name) == ["one"]
    commit(origin, "two")
    assert await ids(tmp_path, name) == ["one", "two"]
    origin.rename(tmp_path / "gone")
    assert await ids(tmp_path, f"file://{origin}#{first}:tasks") == ["one"]
    with pytest.raises(DatasetError, match=r"git ls-remote of .* failed with status"):
        await ids(tmp_path, name)


async def test_two_at_a_time_share_the_cache(tmp_path, origin):
    name = f"file://{origin}#:tasks"
    assert await asyncio.gather(*(ids(tmp_path, name) for _ in range(4))) == [["one"]] * 4
    assert len([*(tmp_path / "cache").glob("*/*")]) == 1


async def test_the_commit_is_part_of_the_item(tmp_path, origin):
    made = HarborEnvironment(HarborConfig(dataset_name=f"file://{origin}#:tasks", cache_dir=str(tmp_path / "cache")))
    await made.setup()
    assert [item["commit"] for item in made.items()] == [git(origin, "rev-parse", "HEAD")]


async def test_nothing_of_the_repository_or_of_hooks_runs(tmp_path, origin):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "gitconfig").write_text(f"[core]\nhooksPath = {hooks}\nfsmonitor = {hooks}/post-checkout\n")
    assert await ids(tmp_path, f"file://{origin}#:tasks") == ["one"]
    assert not (tmp_path / "ran").exists()
    assert not [*(tmp_path / "cache").rglob(".git")]


async def test_submodules_only_if_asked(tmp_path, origin):
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q", "-b", "main")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", f"file://{origin}", "inner")
    git(outer, "commit", "-qm", "outer")
    name = f"file://{outer}#:inner/tasks"
    with pytest.raises(DatasetError, match="has no folder 'inner/tasks'"):
        await ids(tmp_path, name)
    assert await ids(tmp_path, name, submodules=True) == ["one"]


async def test_links_out_of_a_repository_lead_nowhere(tmp_path, origin):
    write_task(tmp_path / "secret")
    (origin / "tasks" / "two").symlink_to(tmp_path / "secret")
    (origin / "folder").symlink_to(tmp_path)
    git(origin, "add", "-A")
    git(origin, "commit", "-qm", "links")
    with pytest.raises(DatasetError, match="leads out of its repository"):
        await ids(tmp_path, f"file://{origin}#:tasks")
    with pytest.raises(DatasetError, match="has no folder 'folder/secret'"):
        await ids(tmp_path, f"file://{origin}#:folder/secret")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("http://host/a", "must be https"),
        ("ssh://git@host/a", "must be https"),
        ("git@host:a/b", "SSH address"),
        ("ext::sh -c id", None),
        ("https://host", "must be https"),
        ("https://host/a?b=c", "must be https"),
        ("https://host/a#--upload-pack=id", "can't be a branch"),
        ("https://host/a#a b", "can't be a branch"),
        ("https://host/a#:../b", "relative path"),
        ("https://host/a#:/b", "relative path"),
        ("https://user:hunter2@host/a", "has credentials"),
        ("https://hunter2@host/a", "has credentials"),
        ("https://user:${NOT_SET_ANYWHERE}@host/a", "not set here"),
    ],
)
def test_names_that_are_no_repository(name, reason):
    if reason is None:
        assert repository_of(name) is None  # a path
        return
    with pytest.raises(DatasetError, match=reason) as raised:
        repository_of(name)
    assert "hunter2" not in str(raised.value)
    assert raised.value.hint


async def test_no_such_ref(tmp_path, origin):
    with pytest.raises(DatasetError, match="has no branch or tag 'nope'"):
        await ids(tmp_path, f"file://{origin}#nope")
    with pytest.raises(DatasetError, match=r"git fetch of .* failed"):
        await ids(tmp_path, f"file://{origin}#{'0' * 40}")


def command_lines() -> list[str]:
    """Return those of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().decode("utf-8", "replace"))
    return lines


async def test_a_password_is_in_no_message_and_no_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter2")
    seen: list[str] = []

    async def serve(reader, writer):
        seen.extend(command_lines())
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    name = f"https://user:${{TOKEN}}@127.0.0.1:{port}/a"
    with pytest.raises(DatasetError, match=r"was not fetched within 0\.5 s") as raised:
        await ids(tmp_path, name, git_timeout_s=0.5)
    server.close()
    assert "hunter2" not in str(raised.value)
    assert any("ls-remote" in line for line in seen)
    assert not any("hunter2" in line for line in seen)
    assert not any(f"127.0.0.1:{port}" in line for line in command_lines())
