"""Our program on another host: the command line that starts it, and the message with its modules and a request."""

from __future__ import annotations

import functools
import json
import shlex
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hermes_core
from hermes_core.sandbox.guest_client.bundle import pack_modules

_CORE = (
    "hermes_core.errors",
    *(f"hermes_core.sandbox.linux.{name}" for name in ("mounts", "namespaces", "probe", "users")),
    *(
        f"hermes_core.sandbox.local.{name}"
        for name in ("directories", "host", "supervisor", "processes", "removal", "view")
    ),
    "hermes_core.sandbox.uids",
)

# The loader has no quote, no newline and no `!`, so that single quotes carry it through any login shell.
_LOADER = (
    "import sys\\n"
    "if sys.version_info < (3, 7):\\n"
    "    sys.stderr.write(chr(10).join([sys.version.split()[0] + chr(32) + sys.executable])); sys.exit(5)\\n"
    "import binascii, io, os, json, marshal, zlib\\n"
    "encoded = len(sys.argv) > 2\\n"
    "text = io.BytesIO(binascii.a2b_base64(sys.stdin.buffer.read() if encoded else bytes()))\\n"
    "def take(n):\\n"
    "    b = bytes()\\n"
    "    while len(b) < n:\\n"
    "        d = text.read(n - len(b)) if encoded else os.read(0, n - len(b))\\n"
    "        if len(d) == 0: sys.exit(3)\\n"
    "        b += d\\n"
    "    return b\\n"
    "def part(): return take(int.from_bytes(take(4), sys.argv[1]))\\n"
    "sources, magic, code, start = marshal.loads(zlib.decompress(part()))\\n"
    "request = json.loads(part().decode())\\n"
    "exec(start)\\n"
)

_START = """
import importlib
from importlib.machinery import ModuleSpec
code = marshal.loads(code) if magic == importlib._bootstrap_external.MAGIC_NUMBER else {}
modules = {**sources, **code}
class Finder:
    def find_spec(self, name, path=None, target=None):
        package = any(known.startswith(name + ".") for known in modules)
        if name in modules or package: return ModuleSpec(name, self, is_package=package)
    def create_module(self, spec): return None
    def exec_module(self, module):
        name = module.__name__
        if name in modules:
            exec(code.get(name) or compile(sources[name], "<" + name + ">", "exec"), module.__dict__)
sys.meta_path.insert(0, Finder())
importlib.import_module(request.pop("main")).main(request)
"""

HOST = "hermes_core.sandbox.local.host"
"""The module whose `main` carries out a request."""


def command_line(python: str, *, encoded: bool = False) -> str:
    """Return the command for the account's login shell: a Python that reads a `message` from standard input.

    Args:
        encoded: whether all of its input is the message, in base64.
    """
    return f"exec {shlex.quote(python)} -I -S -X utf8 -c 'exec(\"{_LOADER}\")' big{' encoded' * encoded}"


def message(request: Mapping[str, Any], same_bytecode: bool | None = None, *, main: str = HOST) -> bytes:
    """Return our modules and a request. Later input on the stream is for the program that the request starts.

    Args:
        same_bytecode: whether the host's Python takes the bytecode of ours; None if that is not known.
        main: the module whose `main` gets the request.
    """
    return _programs(same_bytecode, main) + pack_request({**request, "main": main})


def pack_request(request: Mapping[str, Any]) -> bytes:
    """Return a request as our program reads it: a 32-bit big-endian length, then JSON."""
    body = json.dumps(request).encode("ascii")
    return struct.pack(">I", len(body)) + body


@functools.cache
def _programs(same_bytecode: bool | None, main: str) -> bytes:
    """Return our modules as `_LOADER` expects them."""
    return pack_modules(_modules(main), "<{}>", _START, same_bytecode=same_bytecode)


def _modules(main: str) -> dict[str, Path]:
    """Return the files of the modules that a host needs, by name."""
    top = Path(hermes_core.__file__).parents[1]
    return {name: top / (name.replace(".", "/") + ".py") for name in dict.fromkeys((*_CORE, main))}
