"""Reads a container definition of Apptainer: the image, the script `%post`, and the variables of `%environment`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

IGNORED = ("runscript", "startscript", "test", "labels", "help")
"""Sections that have no effect on a task."""
REFUSED = {
    "setup": "it runs on the host",
    "pre": "it runs on the host",
    "arguments": "it has no values here",
}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

PRIVATE = ("/home", "/tmp", "/var/tmp", "/dev/shm")
"""Directories in which agents can write, so that root's commands must not find programs there."""
_FORBIDDEN = re.compile(r"LD_.*|IFS|ENV|BASH_ENV|HERMES_.*")

_SECTION = re.compile(r"%([A-Za-z]\w*)(?:[ \t]+(\S.*?))?[ \t]*")
_HEADER = re.compile(r"([A-Za-z]+)[ \t]*:[ \t]*(.*?)[ \t]*")
_VARIABLE = re.compile(r"(?:export[ \t]+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*)|(.?))")


class Unsupported(ValueError):
    """The definition demands something that is not supported; the message names it."""


@dataclass(frozen=True)
class Definition:
    """The parts of a definition that a task needs."""

    bootstrap: str
    """The kind of `source`: `docker` or `localimage`."""
    source: str
    """An image's name, or the path of a `.sif` file."""
    post: str = ""
    """The script that makes the initial state as root."""
    shell: str = "sh"
    """The program that runs `post`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    files: tuple[tuple[str, str], ...] = ()
    """Files to copy: each with its path in the task's folder, and its path in the sandbox."""
    ignored: tuple[str, ...] = ()
    """Sections that were ignored."""

    @property
    def image(self) -> str | None:
        """Return the image's name; None for a `.sif` file."""
        return self.source.removeprefix("docker://") if self.bootstrap == "docker" else None


def parse(text: str) -> Definition:
    """Parse a definition.

    Raises:
        Unsupported: the definition demands something that is not supported, or the text is no definition.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    begin = next((number for number, line in enumerate(lines) if line.startswith("%")), len(lines))
    header = _header(lines[:begin])
    bootstrap, source = header.pop("bootstrap", ""), header.pop("from", "")
    if bootstrap not in ("docker", "localimage"):
        raise Unsupported(f"Bootstrap is {bootstrap!r}; docker and localimage are supported")
    if not source:
        raise Unsupported("From is missing")
    if header:
        raise Unsupported(f"the header has {', '.join(sorted(header))}, which is not supported")
    posts: list[str] = []
    shell, ignored = "sh", []
    variables: dict[str, str] = {}
    files: list[tuple[str, str]] = []
    for name, argument, body in _sections(lines[begin:]):
        if name == "post":
            shell = _shell(argument)
            posts.append(body)
        elif name == "environment":
            _add_variables(body, variables)
        elif name == "files":
            if argument:
                raise Unsupported(f"%files {argument}: there are no stages")
            files += _files(body)
        elif name in IGNORED:
            ignored.append(name)
        else:
            raise Unsupported(f"%{name}: {REFUSED.get(name, 'this section is not known')}")
    post = "\n".join(posts)
    if found := re.search(r"(?:APPTAINER|SINGULARITY)_(?:ENVIRONMENT|ROOTFS)", post):
        raise Unsupported(f"%post uses {found[0]}, which only Apptainer has")
    return Definition(bootstrap, source, post, shell, variables, tuple(files), tuple(dict.fromkeys(ignored)))


def _header(lines: Iterable[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _HEADER.fullmatch(line.strip())
        if match is None:
            raise Unsupported(f"the header has the line {line.strip()[:100]!r}")
        found[match[1].lower()] = match[2]
    return found


def _sections(lines: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    """Yield each section's name, argument and text."""
    name, argument, body = "", "", []
    for line in lines:
        match = _SECTION.fullmatch(line)
        if match is None:
            body.append(line)
            continue
        if name:
            yield name, argument, "\n".join(body) + "\n"
        name, argument, body = match[1].lower(), match[2] or "", []
    if name:
        yield name, argument, "\n".join(body) + "\n"


def _shell(argument: str) -> str:
    """Return the program of `%post -c /bin/bash`."""
    words = argument.split()
    if not words:
        return "sh"
    if len(words) == 2 and words[0] == "-c" and words[1] in ("/bin/sh", "/bin/bash", "sh", "bash"):
        return words[1].rpartition("/")[2]
    raise Unsupported(f"%post {argument}: only -c with sh or bash is supported")


def _add_variables(body: str, variables: dict[str, str]) -> None:
    """Add the variables of `%environment`. Values may refer to earlier variables and to PATH. Commands are refused."""
    for number, line in enumerate(body.splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _VARIABLE.fullmatch(text)
        if match is None or "`" in text or "$(" in text:
            raise Unsupported(f"%environment, line {number}: {text[:100]!r} is more than a variable")
        if _FORBIDDEN.fullmatch(match[1]):
            raise Unsupported(f"%environment, line {number}: {match[1]} would change root's commands")
        variables[match[1]] = _value(match[2], variables, number)
    if "PATH" in variables:
        variables["PATH"] = ":".join(filter(_is_of_the_system, variables["PATH"].split(":"))) or PATH


def _is_of_the_system(folder: str) -> bool:
    return folder.startswith("/") and not any(f"{folder}/".startswith(f"{place}/") for place in PRIVATE)


def _value(word: str, variables: Mapping[str, str], number: int) -> str:
    try:
        parts = shlex.split(word, comments=True)
    except ValueError:
        parts = ["", ""]
    if len(parts) > 1:
        raise Unsupported(f"%environment, line {number}: {word[:100]!r} is not one value")
    if word.startswith("'"):
        return "".join(parts)

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in variables:
            return variables[name]
        if name == "PATH":
            return PATH
        raise Unsupported(f"%environment, line {number}: {match[0]} is not known")

    return _REFERENCE.sub(replace, "".join(parts))


def _files(body: str) -> Iterable[tuple[str, str]]:
    for line in body.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        source = PurePosixPath(words[0])
        target = words[1] if len(words) > 1 else f"/{source.name}"
        if len(words) > 2 or source.is_absolute() or ".." in source.parts or not target.startswith("/"):
            raise Unsupported(f"%files: {line.strip()[:100]!r} is no file of the task's folder and a path for it")
        yield str(source), target
