"""The tools, toolsets and distributions that come with the core, registered through the same hook as anyone's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.tools.files import READ_FILE, WRITE_FILE
from hermes_core.tools.patch import PATCH
from hermes_core.tools.process import PROCESS
from hermes_core.tools.search import SEARCH_FILES
from hermes_core.tools.terminal import TERMINAL

if TYPE_CHECKING:
    from hermes_core.plugins.registry import ToolRegistrar


@hookimpl
def hermes_register_tools(registry: ToolRegistrar) -> None:
    """Terminal and file tools, and the usual choices of them."""
    for tool in (TERMINAL, PROCESS, READ_FILE, WRITE_FILE, PATCH, SEARCH_FILES):
        registry.add(tool)
    registry.add_toolset("terminal", tools=("terminal", "process"), summary="Run commands, also in the background")
    registry.add_toolset(
        "file", tools=("read_file", "write_file", "patch", "search_files"), summary="Read, write, change and find files"
    )
    registry.add_toolset("debugging", includes=("terminal", "file"), summary="Commands and files")
    registry.add_toolset("safe", tools=("read_file", "search_files"), summary="Nothing that runs commands or writes")
    registry.add_distribution("default", {"terminal": 100, "file": 100}, summary="Everything of the core")
    registry.add_distribution("development", {"terminal": 80, "file": 80}, summary="Mostly both")
    registry.add_distribution("terminal_only", {"terminal": 100, "file": 100}, summary="Both, nothing of plugins")
    registry.add_distribution("terminal_tasks", {"terminal": 97, "file": 97}, summary="Nearly always both")
    registry.add_distribution("balanced", {"terminal": 50, "file": 50}, summary="Each half of the time")
