"""A server made with the `mcp` package, in the slot of a container."""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from packaging.requirements import Requirement

from hermes_core.mcp.opening import open_servers
from hermes_core.mcp.servers import McpServer
from hermes_core.runtime import Runtime
from hermes_core.tools.base import CallContext
from hermes_core.tools.registry import ToolRegistry
from tests.mcp.mcp_servers import HERE


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and all that it needs, by name."""
    name = name.lower().replace("_", "-")
    with suppress(PackageNotFoundError):
        if name not in found:
            found[name] = distribution(name)
            for text in found[name].requires or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": "crypto"}):
                    needed(requirement.name, found)
    return found


def packages() -> bytes:
    """The `mcp` package and all that it needs, as a tar."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for each in needed("mcp", {}).values():
            for file in each.files or ():
                path = Path(str(file.locate()))
                if not str(file).startswith("..") and path.suffix != ".pyc" and path.is_file():
                    tar.add(path, f"packages/{file}")
        tar.add(HERE / "real_server.py", "real_server.py")
    return archive.getvalue()


@pytest.mark.parametrize("level", ["user", "dedicated"])
@pytest.mark.entry_points
async def test_a_server_in_a_container(
    docker_images: tuple[str, str], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_PLUGINS", "docker")
    server = McpServer(command="python3", args=("real_server.py",), env={"PYTHONPATH": "packages"})
    config = {"image": docker_images[0], "orphan_ttl_s": 120}
    archive = packages()
    async with (
        Runtime() as runtime,
        runtime.tool_backend("docker", isolation=level, config=config) as backend,
        backend.lease("t") as slot,
    ):
        commands = backend.commands(slot)
        await commands.tar_in(".", archive)
        async with open_servers({"real": server}, commands) as opened:
            tools = {tool.name: tool for tool in opened.tools}
            context = CallContext(commands=commands, timeout_s=60)
            added = await ToolRegistry().call(tools["real__add"], context, {"a": 2, "b": 3})
            assert added.output == "5", added.error
        left = await commands.run("grep -lsa '[r]eal_server' /proc/[0-9]*/cmdline")
        assert left.text == ""
