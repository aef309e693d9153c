"""The servers of the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hermes_core.mcp.servers import McpServer

HERE = Path(__file__).parent


def odd(how: str, **settings: Any) -> McpServer:
    """A server of `odd_server.py`."""
    return McpServer(command=sys.executable, args=("-S", str(HERE / "odd_server.py"), how), **settings)


def real(*arguments: str, **settings: Any) -> McpServer:
    """A server made with the `mcp` package."""
    return McpServer(command=sys.executable, args=(str(HERE / "real_server.py"), *arguments), **settings)
