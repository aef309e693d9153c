"""Packs modules for a Python elsewhere. Contains the loader, which `python3 -c` runs to receive the guest's modules."""

from __future__ import annotations

import functools
import marshal
import struct
import zlib
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType
from typing import Any

NO_GUEST = 4
"""The exit status of a bridge that found no guest to join."""

TOO_OLD = 5
"""The exit status of the loader if Python is older than 3.7."""

LOADER = """
import sys
if sys.version_info < (3, 7):
    sys.stderr.write("python3 is %d.%d, and the guest needs 3.7" % sys.version_info[:2]); sys.exit(5)
import gc, importlib, marshal, os, zlib
gc.disable()
from importlib.machinery import ModuleSpec
def rd(n):
    b = b""
    while len(b) < n:
        d = os.read(0, n - len(b))
        if not d: sys.exit(3)
        b += d
    return b
src, magic, code = marshal.loads(zlib.decompress(rd(int.from_bytes(rd(4), "big"))))
code = marshal.loads(code) if magic == importlib._bootstrap_external.MAGIC_NUMBER else {}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in src: return ModuleSpec(name, self, is_package=name.count(".") < 2)
    def create_module(self, spec): return None
    def exec_module(self, m):
        key = m.__name__
        exec(code.get(key) or compile(src[key], "<" + key + ">", "exec"), m.__dict__)
sys.meta_path.insert(0, Finder())
from hermes_guest.guest.main import main
main(sys.argv[1], sys.argv[2] == "join")
sys.stderr.flush()
os._exit(0)
"""
"""Receives the payload on standard input and runs it as the package `hermes_guest`. Nothing is written to the disk.

Garbage collection is off while the modules load. `_exit` skips the interpreter's shutdown, which would take a third of
the start-up time.
"""

_OLD_MARSHAL = 2
"""A version of marshal's format that every Python reads."""


@functools.cache
def payload() -> bytes:
    """Return the guest's modules for the loader: a 32-bit big-endian length, then compressed data."""
    sandbox = Path(__file__).parents[1]
    modules = {"hermes_guest": sandbox / "guest" / "__init__.py"}
    for package in ("guest", "linux"):
        for path in sorted((sandbox / package).glob("*.py")):
            name = f"hermes_guest.{package}.{path.stem}"
            modules[name.removesuffix(".__init__")] = path
    return pack_modules(modules, "<{}>")


def pack_modules(modules: Mapping[str, Path], file_name: str, *more: str, same_bytecode: bool | None = None) -> bytes:
    """Return modules for a Python elsewhere: a 32-bit big-endian length, then compressed data of `marshal`.

    Each module is packed as source, for any Python, and compiled, for a Python with our bytecode: compiling there would
    take as long as the rest of the guest's start.

    Args:
        modules: the files of the modules by name.
        file_name: the name of a file in tracebacks, where {} stands for the module's name.
        more: texts that follow the sources, our magic number and the code.
        same_bytecode: whether that Python has our bytecode. True leaves out the sources, False the code; None (not
            known) packs both.
    """
    sources, codes = {}, {}
    if not same_bytecode:
        sources = {name: path.read_text("utf-8") for name, path in modules.items()}
    if same_bytecode is not False:
        codes = {name: _compile_module(name, path, file_name.format(name)) for name, path in modules.items()}
    content: Any = (sources, MAGIC_NUMBER, marshal.dumps(codes), *more)
    data = zlib.compress(marshal.dumps(content, _OLD_MARSHAL), 1)
    return struct.pack(">I", len(data)) + data


def _compile_module(name: str, path: Path, file_name: str) -> CodeType | None:
    """Return a module's code, from Python's own cache if possible. The code contains no path of this host."""
    code = SourceFileLoader(name, str(path)).get_code(name)
    return code and _replace_file_name(code, file_name)


def _replace_file_name(code: CodeType, file: str) -> CodeType:
    constants = tuple(_replace_file_name(each, file) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=constants)


def guest_argv(state_dir: str, *, join: bool) -> list[str]:
    """Return the command that joins a sandbox's guest. Unless `join`, it starts a guest if there is none."""
    return ["python3", "-I", "-S", "-X", "utf8", "-c", LOADER, state_dir, "join" if join else "start"]
