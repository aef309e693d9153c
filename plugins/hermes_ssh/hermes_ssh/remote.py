"""What is sent to a host to run there: a line that every shell understands, and our programs on standard input."""

from __future__ import annotations

import functools
import json
import shlex
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hermes_core

_CORE = (
    "errors",
    "sandbox.guest.mounts",
    "sandbox.guest.namespaces",
    "sandbox.guest.probe",
    "sandbox.guest.users",
    *(f"sandbox.local.{name}" for name in ("directories", "host", "supervisor", "processes", "removal", "view")),
    "sandbox.uids",
)

# No quote, no newline and no `!` in it, so that a pair of single quotes carries it through any login shell.
_LOADER = (
    "import sys\\n"
    "if sys.version_info < (3, 7):\\n"
    "    sys.stderr.write(chr(10).join([sys.version.split()[0] + chr(32) + sys.executable])); sys.exit(5)\\n"
    "import os, json, zlib\\n"
    "def take(n):\\n"
    "    b = bytes()\\n"
    "    while len(b) < n:\\n"
    "        d = os.read(0, n - len(b))\\n"
    "        if len(d) == 0: sys.exit(3)\\n"
    "        b += d\\n"
    "    return b\\n"
    "source, request = json.loads(zlib.decompress(take(int.from_bytes(take(4), sys.argv[1]))).decode())\\n"
    "exec(source)\\n"
)

_START = """
from importlib.machinery import ModuleSpec
class Finder:
    def find_spec(self, name, path=None, target=None):
        package = any(known.startswith(name + ".") for known in sources)
        if name in sources or package: return ModuleSpec(name, self, is_package=package)
    def create_module(self, spec): return None
    def exec_module(self, module):
        name = module.__name__
        if name in sources: exec(compile(sources[name], "<" + name + ">", "exec"), module.__dict__)
sources, request = request
sys.meta_path.insert(0, Finder())
from hermes_core.sandbox.local.host import main
main(request)
"""


def command_line(python: str) -> str:
    """Return the command for the account's login shell: an interpreter that waits for `message` on standard input."""
    return f"exec {shlex.quote(python)} -I -S -X utf8 -c 'exec(\"{_LOADER}\")' big"


def message(request: Mapping[str, Any]) -> bytes:
    """Return our programs and a request to them. What follows on the stream is for the program that is entered."""
    packed = zlib.compress(json.dumps([_START, [_sources(), request]]).encode("ascii"), 6)
    return struct.pack(">I", len(packed)) + packed


@functools.cache
def _sources() -> dict[str, str]:
    core = Path(hermes_core.__file__).parent
    return {f"hermes_core.{name}": (core / (name.replace(".", "/") + ".py")).read_text("utf-8") for name in _CORE}
