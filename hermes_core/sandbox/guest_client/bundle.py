"""Packs the guest's modules into one payload, and the loader that `python3 -c` runs to receive it."""

from __future__ import annotations

import functools
import json
import struct
import zlib
from pathlib import Path

NO_GUEST = 4
"""The exit status of a bridge that has found no guest to join."""

TOO_OLD = 5
"""The exit status of the loader where Python is older than the guest needs."""

LOADER = """
import sys
if sys.version_info < (3, 7):
    sys.stderr.write("python3 is %d.%d, and the guest needs 3.7" % sys.version_info[:2]); sys.exit(5)
import os, json, zlib
from importlib.machinery import ModuleSpec
def rd(n):
    b = b""
    while len(b) < n:
        d = os.read(0, n - len(b))
        if not d: sys.exit(3)
        b += d
    return b
src = json.loads(zlib.decompress(rd(int.from_bytes(rd(4), "big"))).decode())
class Finder:
    def find_spec(self, name, path=None, target=None):
        top, _, key = name.partition(".")
        key = key or "__init__"
        if top == "hermes_guest" and key in src: return ModuleSpec(name, self, is_package=key == "__init__")
    def create_module(self, spec): return None
    def exec_module(self, m):
        key = m.__name__.partition(".")[2] or "__init__"
        exec(compile(src[key], "<guest>/" + key + ".py", "exec"), m.__dict__)
sys.meta_path.insert(0, Finder())
from hermes_guest.main import main
main(sys.argv[1], sys.argv[2] == "join")
"""
"""Receives the payload on standard input and runs it as the package `hermes_guest`. Nothing touches the disk."""


@functools.cache
def payload() -> bytes:
    """Return the guest's sources as the loader expects them: a 32-bit big-endian length, then compressed JSON."""
    folder = Path(__file__).parents[1] / "guest"
    sources = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.py"))}
    packed = zlib.compress(json.dumps(sources).encode("ascii"), 6)
    return struct.pack(">I", len(packed)) + packed


def guest_argv(state_dir: str, *, join: bool) -> list[str]:
    """Return the command that starts the guest of a sandbox, or joins it; with `join` it never starts another."""
    return ["python3", "-I", "-S", "-X", "utf8", "-c", LOADER, state_dir, "join" if join else "start"]
