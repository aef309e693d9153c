"""Warns when a solution is within the agents' reach: in an image, a cache or an index that slots can read.

The search is done in a slot before an agent is in it. It looks for the modules that the tasks' patches change, in any
copy that the slot can read: among an image's packages, vendored by another package, in the tests' own environment. It
also looks for archives and repositories named like the project, for pip's cache, and for a package index that answers.
What is found may be of another version, or another project's: it is a warning, and refuses nothing.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hermes_core.errors import CommandError

if TYPE_CHECKING:
    from hermes_core.envs.workspace import LeasedSlot
    from hermes_swe_smith.repos import Source
    from hermes_swe_smith.rows import Task

log = logging.getLogger("hermes_core.swe_smith")

SEARCH_S = 15.0
"""Seconds that a search may take; what was found by then is told."""

_NAMED = 5

_INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX")

_CHANGED = re.compile(r"^(?:---|\+\+\+) [ab]/(.+?)\t?$", re.MULTILINE)

# Told on standard input what to look for, as command lines can be read by others. Python >= 3.7.
_SEARCH = r"""
import json, os, re, socket, sys, threading, time
told = json.load(sys.stdin)
skipped = tuple(told["skipped"])
end = time.monotonic() + told["seconds"]
modules = {}
for module in told["modules"]:
    package, _, name = module.rpartition("/")
    modules.setdefault(name, []).append(package)
projects = set(told["projects"])
ARCHIVES = (".whl", ".egg", ".zip", ".conda", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
plain = lambda name: re.sub("[-_.]+", "-", name.lower())
found, reached = [], []

def connect(host, port):
    try:
        socket.create_connection((host, port), 3).close()
        reached.append("%s:%d" % (host, port))
    except (OSError, UnicodeError):
        pass

threads = [threading.Thread(target=connect, args=place, daemon=True) for place in told["hosts"]]
for thread in threads:
    thread.start()

def is_copy(place, name, names):
    for package in modules.get(name, ()):
        if package and ("/" + place.lstrip("/")).endswith("/" + package):
            return True
        top = os.path.basename(place)
        if not package and (
            top in ("site-packages", "dist-packages", "_vendor") or names & {"setup.py", "pyproject.toml"}
        ):
            return True
    return False

def is_archive(name):
    match = name.endswith(ARCHIVES) and re.match(r"(.+?)-\d", name)
    return bool(match) and plain(match[1]) in projects

def look(place, directories, names):
    folder = re.sub("/__pycache__$", "", place)
    for name in names:
        stem, _, suffix = name.partition(".")
        code = stem in modules and suffix.endswith(("py", "pyc", "so", "pyx")) and is_copy(folder, stem, names)
        if (code or is_archive(name)) and os.access(os.path.join(place, name), os.R_OK):
            yield os.path.join(place, name)
    top = os.path.basename(place)
    if {"objects", "refs"} <= set(directories) and "HEAD" in names:
        owner = os.path.dirname(place) if top == ".git" else place
        if plain(re.sub(r"\.git$", "", os.path.basename(owner))) in projects:
            yield place
    if top == "pip" and {"http", "http-v2", "wheels"} & set(directories):
        yield place

def walk():
    for place, directories, names in os.walk("/"):
        if time.monotonic() > end:
            return
        directories[:] = [name for name in directories if not os.path.join(place, name, "").startswith(skipped)]
        for path in look(place, directories, set(names)):
            if path not in found:
                found.append(path)
            if len(found) >= told["most"]:
                return

walk()
for thread in threads:
    thread.join(max(0.0, min(3.0, end - time.monotonic())))
print(json.dumps({"found": found, "reached": reached}))
sys.stdout.flush()
os._exit(0)
"""


class Reach:
    """What was looked for in a run already: each image and project once, and each index that answers is told once."""

    def __init__(self) -> None:
        self._looked: set[tuple[str | None, str]] = set()
        self._reached: set[str] = set()

    async def look(self, site: LeasedSlot, task: Task, source: Source, tasks: Iterable[Task]) -> None:
        """Search a slot that no agent is in yet, for the solutions of this task's project, and warn of what is found.

        Args:
            tasks: all of the run; those of the same repository are looked for together.

        Raises:
            InfraError: the sandbox failed. A search that fails is no reason to fail a rollout.
        """
        if (task.image, source.key) in self._looked:
            return
        self._looked.add((task.image, source.key))
        try:
            await self._look(site, task, source, tasks)
        except BaseException:
            self._looked.discard((task.image, source.key))
            raise

    async def _look(self, site: LeasedSlot, task: Task, source: Source, tasks: Iterable[Task]) -> None:
        siblings = [each for each in tasks if each.repo == task.repo and each.image == task.image]
        modules = sorted({module for each in siblings for module in changed_modules(each.patch, source.pythonpath)})
        told = {
            "modules": modules,
            "projects": sorted(_project_names(task, modules)),
            "hosts": _hosts(source),
            "skipped": ["/proc/", "/sys/", "/dev/", f"{posixpath.dirname(site.commands.workspace_dir)}/slot_"],
            "seconds": SEARCH_S,
            "most": 50,
        }
        answer = await _search(site, told)
        self._warn(task, answer.get("found", ()), answer.get("reached", ()))

    def _warn(self, task: Task, found: Collection[str], reached: Collection[str]) -> None:
        where = f" of image {task.image}" if task.image else ""
        if found:
            log.debug("%s%s: all that was found: %s", task.repo, where, found)
            places = ", ".join(list(found)[:_NAMED]) + (", …" if len(found) > _NAMED else "")
            log.warning(
                "%s: agents can read what may be the solution, in slots%s: %s; remove it, or hide it (hidden_paths on "
                "local)",
                task.repo,
                where,
                places,
            )
        new = sorted(set(reached) - self._reached)
        if new:
            self._reached.update(new)
            log.warning(
                "agents can reach %s from their slots, and may download solutions there: use isolation 'namespace', or "
                "network 'none' or 'setup'",
                ", ".join(new),
            )


def changed_modules(patch: str, pythonpath: tuple[str, ...] | None) -> set[str]:
    """The modules that a patch is about, as paths from where they are imported, without suffix: `funcy/seqs`."""
    roots = [f"{root}/" for root in pythonpath or ("src",) if root != "."]
    found = set()
    for path in _CHANGED.findall(patch):
        if path.endswith((".py", ".pyx")):
            root = next((root for root in roots if path.startswith(root)), "")
            found.add(path[len(root) :].rpartition(".")[0])
    return found


def _project_names(task: Task, modules: Iterable[str]) -> set[str]:
    """What archives of the project may be called, as package indexes compare names."""
    packages = {module.split("/", 1)[0] for module in modules}
    return {re.sub(r"[-_.]+", "-", name.lower()) for name in {task.directory, *packages}}


def _hosts(source: Source) -> list[tuple[str, int]]:
    """Where a slot could download the project: the preparation's package index, and where the repository is from."""
    urls = [_usual_index(), source.url or ""]
    for name in _INDEX_VARIABLES:
        urls += os.environ.get(name, "").split()
    places = set()
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            places.add((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)))
    return sorted(places)


def _usual_index() -> str:
    """The package index that pip asks unless it is told another one; nothing where there is no pip here."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return ""
    return str(PyPI.simple_url)


async def _search(site: LeasedSlot, told: Mapping[str, Any]) -> dict[str, Any]:
    argv = ["python3", "-I", "-S", "-c", _SEARCH]
    try:
        done = await site.commands.run(argv, stdin=json.dumps(told).encode(), timeout_s=2 * SEARCH_S)
        answer = json.loads(done.stdout) if done.ok else {}
    except (CommandError, ValueError) as error:
        log.info("no search for solutions in the slots: %s", error)
        return {}
    return answer if isinstance(answer, dict) else {}
