"""Warns when agents can reach a solution: in an image, a cache or an index that slots can read.

A slot is searched before its agent begins, once for each image and for each environment of tests. The search looks for
copies of the modules that the tasks' patches change: among an image's packages, vendored by another package, or in the
tests' environment. It also looks for archives and repositories with the project's name, for pip's cache, and for a
package index that answers. A copy may be of another version or of another project, so there is only a warning.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hermes_core import CommandError, SlotHandle
from hermes_swe_smith.repos import RepositorySource, TestEnvironment
from hermes_swe_smith.rows import SweTask

log = logging.getLogger("hermes_core.swe_smith")

SEARCH_S = 15.0
"""Time limit of a search in seconds. The copies that were found by then are reported."""

ANSWER_LIMIT = 8 << 20

_NAMED = 5

_INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX")

_CHANGED = re.compile(r"^(?:---|\+\+\+) [ab]/(.+?)\t?$", re.MULTILINE)

# Reads the objects of the search from standard input, because other users can read command lines. Python >= 3.7.
_SEARCH = r"""
import json, os, re, socket, sys, threading, time
told = json.load(sys.stdin)
skipped = tuple(told["skipped"])
end = time.monotonic() + told["seconds"]
modules, projects, found = {}, {}, {}
for repo, wanted in told["projects"].items():
    found[repo] = []
    for module in wanted["modules"]:
        package, _, name = module.rpartition("/")
        modules.setdefault(name, []).append((package, repo))
    for name in wanted["names"]:
        projects.setdefault(name, []).append(repo)
ARCHIVES = (".whl", ".egg", ".zip", ".conda", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
plain = lambda name: re.sub("[-_.]+", "-", name.lower())
reached = []

def connect(host, port):
    try:
        socket.create_connection((host, port), 3).close()
        reached.append("%s:%d" % (host, port))
    except (OSError, UnicodeError):
        pass

threads = [threading.Thread(target=connect, args=place, daemon=True) for place in told["hosts"]]
for thread in threads:
    thread.start()

def copied(place, name, names):
    for package, repo in modules.get(name, ()):
        if package and ("/" + place.lstrip("/")).endswith("/" + package):
            yield repo
        top = os.path.basename(place)
        if not package and (
            top in ("site-packages", "dist-packages", "_vendor") or names & {"setup.py", "pyproject.toml"}
        ):
            yield repo

def archived(name):
    match = name.endswith(ARCHIVES) and re.match(r"(.+?)-\d", name)
    return projects.get(plain(match[1]), ()) if match else ()

def look(place, directories, names):
    folder = re.sub("/__pycache__$", "", place)
    for name in names:
        stem, _, suffix = name.partition(".")
        code = stem in modules and suffix.endswith(("py", "pyc", "so", "pyx"))
        repos = [*(copied(folder, stem, names) if code else ()), *archived(name)]
        if repos and os.access(os.path.join(place, name), os.R_OK):
            yield os.path.join(place, name), repos
    top = os.path.basename(place)
    if {"objects", "refs"} <= set(directories) and "HEAD" in names:
        owner = os.path.dirname(place) if top == ".git" else place
        yield place, projects.get(plain(re.sub(r"\.git$", "", os.path.basename(owner))), ())
    if top == "pip" and {"http", "http-v2", "wheels"} & set(directories):
        yield place, found

def walk(root):
    for place, directories, names in os.walk(root):
        if time.monotonic() > end:
            return
        if root == "/":
            directories[:] = [name for name in directories if not os.path.join(place, name, "").startswith(skipped)]
        for path, repos in look(place, directories, set(names)):
            for repo in repos:
                if path not in found[repo] and len(found[repo]) < told["most"]:
                    found[repo].append(path)

for root in told["roots"]:
    walk(root)
for repo, wanted in told["projects"].items():
    found[repo] += [path for path in wanted["paths"] if told["whole"] and os.access(path, os.R_OK)]
for thread in threads:
    thread.join(max(0.0, min(3.0, end - time.monotonic())))
print(json.dumps({"found": found, "reached": reached}))
sys.stdout.flush()
os._exit(0)
"""


class Reach:
    """Searches a run's slots: each place once. Each index is reported once.

    Args:
        tasks: all tasks of the run. One search serves all tasks of an image, because their agents read the same files.
        source: returns the source of a task's repository.
    """

    def __init__(
        self, tasks: Iterable[SweTask] = (), source: Callable[[SweTask], RepositorySource] | None = None
    ) -> None:
        self._wanted: dict[str | None, _Wanted] = {}
        self._looked: set[tuple[str | None, str]] = set()
        self._reached: set[str] = set()
        for task in tasks:
            if source is not None:
                self._wanted.setdefault(task.image, _Wanted()).add(task, source(task))

    async def look(self, site: SlotHandle, task: SweTask, environment: TestEnvironment) -> None:
        """Search a slot that no agent has used yet for the solutions of the run's tasks, and log warnings.

        Raises:
            InfraError: the sandbox failed. If only the search fails, the rollout goes on.
        """
        new = {root for root in ("/", environment.directory) if (task.image, root) not in self._looked}
        if not new:
            return
        places = {(task.image, root) for root in new}
        self._looked |= places
        try:
            await self._look(site, task.image, environment, sorted(new))
        except BaseException:
            self._looked -= places
            raise

    async def _look(self, site: SlotHandle, image: str | None, environment: TestEnvironment, roots: list[str]) -> None:
        wanted = self._wanted[image]
        slots = posixpath.dirname(site.commands.workspace_dir)
        told = {
            "projects": {repo: {key: sorted(words) for key, words in each.items()} for repo, each in wanted.of.items()},
            "hosts": sorted(wanted.hosts) if "/" in roots else (),
            "roots": roots,
            "whole": "/" in roots,
            "skipped": [
                *("/proc/", "/sys/", "/dev/", f"{slots}/slot_", f"{posixpath.dirname(environment.directory)}/")
            ],
            "seconds": SEARCH_S,
            "most": 50,
        }
        answer = await _search(site, told)
        for repo in wanted.of:
            _warn(repo, image, answer.get("found", {}).get(repo, ()))
        self._warn_of_hosts(answer.get("reached", ()))

    def _warn_of_hosts(self, reached: Collection[str]) -> None:
        new = sorted(set(reached) - self._reached)
        if new:
            self._reached.update(new)
            log.warning(
                "agents can reach %s from their slots, and may download solutions there: use --isolation namespace, or "
                "a profile with network: setup, or none where the setup needs no network, as the backend offers it",
                ", ".join(new),
            )


@dataclass
class _Wanted:
    """The objects of the search on one image: for each repository, modules, names of archives, and paths; and hosts."""

    of: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    hosts: set[tuple[str, int]] = field(default_factory=set)

    def add(self, task: SweTask, source: RepositorySource) -> None:
        """Add a task."""
        each = self.of.setdefault(task.repo, {"modules": set(), "names": set(), "paths": set()})
        if source.checkout is not None:
            each["paths"] |= {f"{source.checkout}/.git/objects", "/r2e_tests"}
            self.hosts.update(_hosts(source))
            return  # the copies of the modules in the image are the agent's own
        modules = modules_of(task.patch, source.pythonpath)
        each["modules"] |= modules
        each["names"] |= _project_names(task, modules)
        self.hosts.update(_hosts(source))


def _warn(repo: str, image: str | None, found: Collection[str]) -> None:
    if not found:
        return
    where = f" of image {image}" if image else ""
    log.debug("%s%s: all that was found: %s", repo, where, found)
    places = ", ".join(list(found)[:_NAMED]) + (", …" if len(found) > _NAMED else "")
    log.warning(
        "%s: agents can read what may be the solution, in slots%s: %s; remove it, or hide it (hidden_paths on local)",
        repo,
        where,
        places,
    )


def modules_of(patch: str, pythonpath: tuple[str, ...] | None) -> set[str]:
    """Return the modules that a patch changes, as paths below the import root without suffix: `funcy/seqs`."""
    roots = [f"{root}/" for root in pythonpath or ("src",) if root != "."]
    found = set()
    for path in _CHANGED.findall(patch):
        if path.endswith((".py", ".pyx")):
            root = next((root for root in roots if path.startswith(root)), "")
            found.add(path[len(root) :].rpartition(".")[0])
    return found


def _project_names(task: SweTask, modules: Iterable[str]) -> set[str]:
    """Return possible names of the project's archives, normalised as on package indexes."""
    packages = {module.split("/", 1)[0] for module in modules}
    return {re.sub(r"[-_.]+", "-", name.lower()) for name in {task.directory, *packages}}


def _hosts(source: RepositorySource) -> list[tuple[str, int]]:
    """Return the hosts and ports from which a slot could download the project: of package indexes, and of the
    repository."""
    urls = [_usual_index(), source.url or ""]
    for name in _INDEX_VARIABLES:
        urls += os.environ.get(name, "").split()
    places = set()
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            places.add((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)))
    return sorted(places)


@functools.cache
def _usual_index() -> str:
    """Return pip's default package index, or an empty string if there is no pip here."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return ""
    return str(PyPI.simple_url)


async def _search(site: SlotHandle, told: Mapping[str, Any]) -> dict[str, Any]:
    argv = ["python3", "-I", "-S", "-c", _SEARCH]
    try:
        asked = json.dumps(told).encode()
        done = await site.commands.run(argv, stdin=asked, timeout_s=2 * SEARCH_S, output_limit=ANSWER_LIMIT)
        answer = json.loads(done.stdout) if done.ok else {}
    except (CommandError, ValueError) as error:
        log.info("no search for solutions in the slots: %s", error)
        return {}
    return answer if isinstance(answer, dict) else {}
