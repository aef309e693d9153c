"""Builds and compares a task's trees in a private bare repository. This module is sent into the sandbox as source.

The module needs the standard library, git, and Python >= 3.8, and runs as the preparation user, who shares nothing with
the slots. It never has a working tree: it makes trees in temporary indexes, hashes the members of the tar of an agent's
work without unpacking them, and writes a tar again. So configuration, attributes, hooks, links and odd names that an
agent wrote never take effect. Everything made of an agent's work, also git's objects, is in one directory, which the
caller removes. `confine` limits the processor time and the memory of every process that handles an agent's work.

Files are the repository's bytes, without line-end conversion, filters, keywords or `export-ignore`.

The last argument is the name of an operation. Standard input is a JSON line of arguments, then a payload. The output is
one JSON line of limited length, which may be `{"error": code, "message": text}`. The code `failed` means that git
failed for an unknown reason."""

# ruff: noqa: PTH102, PTH103, PTH104, PTH108, PTH118, PTH119, PTH120, PTH123
# (pathlib would be one import more)

from __future__ import annotations

import ast
import fnmatch
import hashlib
import io
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import zlib
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from hermes_swe_smith import manifest
from hermes_swe_smith.doctests import docstring
from hermes_swe_smith.guard import Guard, in_the_way, is_undone, shadows
from hermes_swe_smith.manifest import FILE, LINK, MODULE, PROGRAM

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Iterable, Iterator

    from hermes_swe_smith.manifest import Tree

BLOCK = 1 << 20

ATTRIBUTES = "* -text -crlf !eol -ident !filter !working-tree-encoding -export-ignore -export-subst\n"
"""Attributes that take precedence over a tree's own .gitattributes."""

MEMORY = 2 << 30
"""Maximum number of bytes of memory of each process that handles an agent's work."""
MAX_PATH = 1024
"""Maximum length in bytes of a file's path below the checkout, far below the kernel's limit for the whole path."""
MAX_GITIGNORES = 4 << 20
"""The largest total size of a checkout's .gitignore files, in bytes."""
NAMED = 50
"""Maximum number of restored files, and of removed files, in an answer."""

LEFT_BEHIND = """__pycache__/
*.py[co]
.pytest_cache/
.mypy_cache/
.ruff_cache/
.hypothesis/
.coverage
.tox/
.nox/
*.egg-info/
"""
"""Files that a test run leaves in a checkout. They are no part of an agent's work, unless the tree had them before."""
NOT_BUILT = frozenset(
    (".git", ".venv", "venv", "build", "dist", "__pycache__", "node_modules", ".tox", ".nox", ".eggs", "r2e_tests")
)
"""Directories of a checkout without modules of the project."""


BASE = "refs/hermes/base"
KEPT = ("GIT_SSL_CAINFO",)

OWN_CONFIGURATION_ONLY = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "LC_ALL": "C.UTF-8",
}
"""Variables that keep git from reading configuration other than the repository's, and from asking questions."""

SETTINGS = (
    "core.protectNTFS=false",
    "core.protectHFS=false",
    "core.quotePath=true",
    "gc.auto=0",
    "core.packedGitWindowSize=32m",
    "core.packedGitLimit=256m",
    "core.bigFileThreshold=32m",
)
"""Settings for the names that git writes, and for its memory: it streams large files, and does not treat them as
text."""


class TreeError(Exception):
    """An error that goes to the caller of the program, who handles it by its `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BareRepository:
    """A bare repository.

    Args:
        objects: a directory for new objects; empty puts them into the repository.
    """

    def __init__(self, path: str, objects: str = "") -> None:
        self.path = path
        own = os.path.join(path, "objects")
        self.objects = objects or own
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "XDG_")) or name in KEPT
        }
        self._environment.update(
            OWN_CONFIGURATION_ONLY,
            GIT_DIR=path,
            HOME=path,
            GIT_OBJECT_DIRECTORY=self.objects,
        )
        if objects:
            self._environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = own

    def git(
        self, *words: str, data: bytes = b"", ok: tuple[int, ...] = (0,), most: int | None = None, **env: str
    ) -> bytes:
        """Run git, and return its output. Raises `subprocess.CalledProcessError` for any status that is not in `ok`.

        Args:
            most: maximum number of bytes of output; SIGXFSZ ends a git that writes more.
        """
        options = [word for setting in SETTINGS for word in ("-c", setting)]
        limit = None if most is None else partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                ["git", *options, *words],
                input=data,
                stdout=output,
                stderr=subprocess.PIPE,
                cwd=env.get("GIT_WORK_TREE", self.path),
                env=dict(self._environment, **env),
                preexec_fn=limit,
                check=False,
            )
            output.seek(0)
            printed = output.read()
        if done.returncode not in ok:
            raise subprocess.CalledProcessError(done.returncode, ["git", *words], printed, done.stderr)
        return printed

    def read(self, tree: str) -> Tree:
        """Return the files of a tree."""
        files = {}
        for record in self.git("ls-tree", "-r", "-z", tree).split(b"\0")[:-1]:
            head, path = record.split(b"\t", 1)
            mode, _, name = head.decode().split(" ")
            files[os.fsdecode(path)] = (mode, name)
        return files

    def write(self, files: Tree) -> str:
        """Store the tree of these files, and return its id."""
        records = [f"{mode} {name}\t".encode() + os.fsencode(path) + b"\0" for path, (mode, name) in files.items()]
        with tempfile.TemporaryDirectory() as scratch:
            index = os.path.join(scratch, "index")
            self.git("update-index", "-z", "--index-info", data=b"".join(records), GIT_INDEX_FILE=index)
            return self.git("write-tree", "--missing-ok", GIT_INDEX_FILE=index).decode().strip()

    def apply(self, tree: str, patch: str, what: str, reverse: bool = False) -> str:
        """Apply a patch to a tree, and return the new tree's id."""
        if not patch:
            return tree
        direction = ["-R"] if reverse else []
        with tempfile.TemporaryDirectory() as scratch:
            index = os.path.join(scratch, "index")
            self.git("read-tree", tree, GIT_INDEX_FILE=index)
            try:
                apply = ["apply", "--cached", "--whitespace=nowarn", *direction, "-"]
                self.git(*apply, data=patch.encode("utf-8", "surrogateescape"), GIT_INDEX_FILE=index)
            except subprocess.CalledProcessError as error:
                raise TreeError("patch", f"{what} does not apply: {_git_message(error)}") from error
            return self.git("write-tree", "--missing-ok", GIT_INDEX_FILE=index).decode().strip()

    def commit(self, tree: str) -> str:
        """Make a commit of a tree, without parents, and return the commit's id."""
        who = ("-c", "user.name=hermes-rl", "-c", "user.email=hermes-rl@localhost")
        return self.git(*who, "commit-tree", "-m", "base", tree).decode().strip()

    def contents(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of blobs by name."""
        found = {}
        output = io.BytesIO(self.git("cat-file", "--batch", data="".join(name + "\n" for name in names).encode()))
        while head := output.readline():
            name, _, size = head.split()
            found[name.decode()] = output.read(int(size))
            output.read(1)
        return found

    def diff(self, before: str, after: str, but: Iterable[str] = (), most: int | None = None) -> str:
        """Return the patch from one tree to another, as UTF-8 text that `git apply` accepts.

        Args:
            but: files to leave out.
            most: maximum number of bytes.

        Raises:
            TreeError: the patch is larger than `most`.
        """
        try:
            return self._diff(before, after, but, most)
        except subprocess.CalledProcessError as error:
            if most is None or error.returncode != -signal.SIGXFSZ:
                raise
            raise _too_large("patch", most) from error

    def _diff(self, before: str, after: str, but: Iterable[str], most: int | None) -> str:
        options = ["-p", "--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv"]
        words = ["diff-tree", *options, before, after, "--", *(f":(exclude,literal){path}" for path in but)]
        try:
            return self.git(*words, most=most).decode("utf-8")
        except UnicodeDecodeError:  # a text file has another encoding, so use git's binary form, which is ASCII
            with tempfile.TemporaryDirectory() as scratch:
                attributes = os.path.join(scratch, "attributes")
                with open(attributes, "w", encoding="ascii") as file:
                    file.write("* -diff\n")
                setting = "core.attributesFile=" + attributes
                return self.git("-c", setting, *words, most=most).decode("utf-8")

    def find_ignored(self, paths: Iterable[str], gitignores: dict[str, bytes]) -> set[str]:
        """Return the paths that these .gitignore files, or `LEFT_BEHIND`, exclude."""
        # Behind "./", git does not take a leading colon for pathspec magic.
        listing = b"".join(b"./" + os.fsencode(path) + b"\0" for path in paths)
        if not listing:
            return set()
        with tempfile.TemporaryDirectory() as scratch:
            for path, content in gitignores.items():
                place = os.path.join(scratch, path)
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with open(place, "wb") as file:
                    file.write(content)
            words = ["check-ignore", "-z", "--stdin", "--no-index"]
            found = self.git(*words, data=listing, ok=(0, 1), GIT_WORK_TREE=scratch)
        return {os.fsdecode(path[2:]) for path in found.split(b"\0")[:-1]}

    def archive(self, tree: str, directory: str) -> dict[str, Any]:
        """Write a tar of the tree to a new file in the directory, and return its path."""
        descriptor, path = tempfile.mkstemp(suffix=".tar", dir=directory)
        os.close(descriptor)
        try:
            # With "./" in front of each name, because some programs guess an archive's format by its first bytes.
            self.git("-c", "tar.umask=0022", "archive", "--format=tar", "--prefix=./", "-o", path, tree)
        except BaseException:
            os.unlink(path)
            raise
        return {"tar": path}


class Blobs:
    """Stores contents of files in a directory of git objects, piece by piece.

    Args:
        known: names of blobs that the repository has already.
    """

    def __init__(self, directory: str, known: set[str]) -> None:
        self.sizes: dict[str, int] = {}
        self._directory = directory
        self._known = known

    def add(self, source: IO[bytes], size: int) -> str:
        """Store the next `size` bytes of a stream. Return the blob's name."""
        pieces: Iterable[bytes] = _pieces(source, size)
        if size <= BLOCK:  # hash small contents first, because most are known and need no writing
            pieces = [b"".join(pieces)]
        name = manifest.blob_name(size, pieces) if isinstance(pieces, list) else ""
        if name not in self._known:
            name = self._store(size, pieces)
        self.sizes[name] = size
        return name

    def _store(self, size: int, pieces: Iterable[bytes]) -> str:
        """Write a loose object. It is not compressed, because it is read only once or twice."""
        head = b"blob %d\0" % size
        name, packer = hashlib.sha1(head), zlib.compressobj(0)
        incoming = os.path.join(self._directory, "incoming")
        with open(incoming, "wb") as file:
            file.write(packer.compress(head))
            for piece in pieces:
                name.update(piece)
                file.write(packer.compress(piece))
            file.write(packer.flush())
        found = name.hexdigest()
        os.makedirs(os.path.join(self._directory, found[:2]), exist_ok=True)
        os.rename(incoming, os.path.join(self._directory, found[:2], found[2:]))
        self._known.add(found)
        return found


def _pieces(source: IO[bytes], size: int) -> Iterator[bytes]:
    while size:
        piece = source.read(min(BLOCK, size))
        if not piece:
            raise EOFError("the archive is cut off")
        size -= len(piece)
        yield piece


def make_repository(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Make the bare repository `repo` with its base commit, and return the texts of the files `read`.

    Its source is a bundle, a URL, or a checkout in the image.
    """
    try:
        repo = _new_repository(arguments["repo"])
        commit = arguments.get("commit")
        if arguments.get("bundle"):
            repo.git("bundle", "unbundle", arguments["bundle"])
        elif arguments.get("checkout"):
            commit = _copy(repo, arguments["checkout"], commit)
        else:
            commit = _fetch(repo, arguments["url"], commit)
        repo.git("update-ref", BASE, repo.git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip())
        return {"files": _texts(repo, arguments["read"])}
    except subprocess.CalledProcessError as error:
        raise TreeError("repository", _git_message(error)) from error


def _new_repository(path: str) -> BareRepository:
    repo = BareRepository(path)
    os.makedirs(path)
    repo.git("init", "-q", "--bare", "--template=", path)
    os.mkdir(os.path.join(path, "info"))
    for name, content in (("attributes", ATTRIBUTES), ("exclude", LEFT_BEHIND)):
        with open(os.path.join(path, "info", name), "w", encoding="utf-8") as file:
            file.write(content)
    return repo


def _texts(repo: BareRepository, paths: list[str]) -> dict[str, str]:
    """Return the texts of the base's files with these paths, in which `*` matches within one part of a path."""
    texts = {}
    for path, (mode, name) in repo.read(BASE).items():
        matches = any(path.count("/") == each.count("/") and fnmatch.fnmatchcase(path, each) for each in paths)
        if matches and mode in (FILE, PROGRAM):
            texts[path] = repo.git("cat-file", "blob", name).decode("utf-8", "replace")
    return texts


def _fetch(repo: BareRepository, url: str, commit: str | None) -> str:
    """Fetch a commit and its parent, or all branches if the server does not serve single commits. Return the commit's
    name."""
    try:
        repo.git("fetch", "-q", "--no-tags", "--depth=2", url, commit or "HEAD")
        return commit or "FETCH_HEAD"
    except subprocess.CalledProcessError:
        repo.git("fetch", "-q", "--no-tags", url, "+HEAD:refs/hermes/head", "+refs/heads/*:refs/remote/*")
        return commit or "refs/hermes/head"


def _copy(repo: BareRepository, checkout: str, commit: str | None) -> str:
    """Copy the tree of a checkout's commit, without history. Return a new commit of the tree.

    The tests also need modules that were compiled or generated in the checkout and that git does not track. So these
    modules are added to the tree.

    Args:
        commit: the commit; None is the one that is checked out.
    """
    theirs = os.path.join(checkout, ".git")
    alternates = os.path.join(repo.path, "objects", "info", "alternates")
    if not os.access(os.path.join(theirs, "objects"), os.R_OK):
        raise TreeError("repository", f"the image has no repository in {checkout}, or not one that can be read")
    os.makedirs(os.path.dirname(alternates), exist_ok=True)
    with open(alternates, "w", encoding="utf-8") as file:
        file.write(os.path.join(theirs, "objects") + "\n")
    # With GIT_DIR set, git does not check who owns the directory.
    plain = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=" + os.devnull)
    found = repo.git(*plain, "rev-parse", "--verify", f"{commit or 'HEAD'}^{{commit}}", GIT_DIR=theirs).decode().strip()
    files = repo.read(found)
    blobs = Blobs(repo.objects, set())
    others = repo.git(*plain, "ls-files", "-o", "-z", GIT_DIR=theirs, GIT_WORK_TREE=checkout).split(b"\0")[:-1]
    for path in map(os.fsdecode, others):
        place = os.path.join(checkout, path)
        if path not in files and _is_built(path) and stat.S_ISREG(os.lstat(place).st_mode):
            with open(place, "rb") as file:
                files[path] = FILE, blobs.add(file, os.fstat(file.fileno()).st_size)
    tree = repo.write(files)
    heads = [record.split(b"\t")[0].split() for record in repo.git("ls-tree", "-r", "-t", "-z", tree).split(b"\0")[:-1]]
    names = [tree.encode(), *(name for _, kind, name in heads if kind != b"commit")]
    repo.git("pack-objects", "-q", os.path.join(repo.objects, "pack", "pack"), data=b"\n".join(names) + b"\n")
    os.unlink(alternates)
    return repo.commit(tree)


def _is_built(path: str) -> bool:
    """Return whether an untracked file may come from an editable installation: a module, or metadata."""
    *folders, name = path.split("/")
    return not NOT_BUILT.intersection(folders) and (
        name.endswith((".py", ".so", ".pyd")) or any(folder.endswith(".egg-info") for folder in folders)
    )


def import_project(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Make the bundle `bundle` of one new commit, with the tree of `ref` in `source`: a URL, a bundle, or a git
    directory.

    Equal trees and messages give equal commits. The answer's `upstream` is the name of the original commit.
    """
    try:
        repo = _new_repository(arguments["repo"])
        upstream = _fetch_ref(repo, arguments["source"], arguments["ref"])
        identity: dict[str, Any] = {
            **{f"GIT_{who}_{what}": "hermes-rl" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
            **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
        }
        message = f"{arguments['message']} {upstream}"
        commit = repo.git("commit-tree", upstream + "^{tree}", "-m", message, **identity).decode().strip()
        repo.git("update-ref", "refs/heads/main", commit)
        repo.git("update-ref", BASE, commit)
        repo.git("symbolic-ref", "HEAD", "refs/heads/main")
        repo.git("-c", "pack.threads=1", "bundle", "create", "-q", arguments["bundle"], "HEAD", "refs/heads/main")
    except subprocess.CalledProcessError as error:
        raise TreeError("repository", _git_message(error)) from error
    return {"upstream": upstream, "commit": commit, "files": _texts(repo, arguments["read"])}


def pack_sources(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Write a tar of the base's Python files to the directory `to`, and return the tar's path."""
    repo = BareRepository(arguments["repo"])
    files = repo.read(BASE)
    kept = {path: entry for path, entry in files.items() if path.endswith(".py") and entry[0] in (FILE, PROGRAM)}
    return repo.archive(repo.write(kept), arguments["to"])


def _fetch_ref(repo: BareRepository, source: str, ref: str) -> str:
    """Fetch a commit by its id, an abbreviation, a branch or a tag. Return its id."""
    try:
        repo.git("fetch", "-q", "--no-tags", "--depth=1", "--", source, ref)
        found = "FETCH_HEAD"
    except subprocess.CalledProcessError:
        every = ("+refs/heads/*:refs/remote/*", "+refs/tags/*:refs/tags/*")
        repo.git("fetch", "-q", "--no-tags", "--", source, *every)
        names = (ref, f"refs/remote/{ref}", *(["refs/remote/main", "refs/remote/master"] if ref == "HEAD" else []))
        known = [name for name in names if _is_commit(repo, name)]
        if not known:
            raise TreeError("repository", f"there is no commit {ref!r}") from None
        found = known[0]
    return repo.git("rev-parse", "--verify", found + "^{commit}").decode().strip()


def _is_commit(repo: BareRepository, name: str) -> bool:
    try:
        repo.git("rev-parse", "-q", "--verify", name + "^{commit}")
    except subprocess.CalledProcessError:
        return False
    return True


def make_patch(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Return the patch that gives some files of the base's tree new contents.

    `files` has a path and a length for each file; the payload has the contents, one after the other. The patch is
    tested in both directions."""
    repo = BareRepository(arguments["repo"])
    clean = repo.git("rev-parse", BASE + "^{tree}").decode().strip()
    files = repo.read(clean)
    for path, size in arguments["files"]:
        name = repo.git("hash-object", "-w", "--stdin", data=stream.read(size)).decode().strip()
        files[path] = (files[path][0], name)
    buggy = repo.write(files)
    patch = repo.diff(clean, buggy)
    if repo.apply(clean, patch, "the patch") != buggy or repo.apply(buggy, patch, "the patch", reverse=True) != clean:
        raise TreeError("patch", "the patch does not make the change, or does not undo it")
    return {"patch": patch}


def make_trees(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Make the task's trees: `clean`, which passes every test, `buggy`, and `agent`, which is `buggy` without the
    hidden files.

    The directory `task` gets `trees.json` with the trees' files, `agent` with the id and the digest of the agent's
    tree, and `fix.patch`, the reference solution: the difference from `agent` to `clean` without the hidden files."""
    repo = BareRepository(arguments["repo"])
    patches = json.load(stream)
    listed = {*arguments["test_files"], *arguments["doctests"]}
    to_buggy = arguments["patch_is"] == "bug"
    if arguments["base_is"] == "clean":
        clean = repo.git("rev-parse", BASE + "^{tree}").decode().strip()
        buggy = repo.apply(clean, patches["patch"], "`patch`", reverse=not to_buggy)
    else:
        buggy = repo.git("rev-parse", BASE + "^{tree}").decode().strip()
        if not arguments["has_test_patch"]:
            buggy = _with_removed_tests(repo, listed)
        clean = repo.apply(buggy, patches["patch"], "`patch`", reverse=to_buggy)
    clean_files, buggy_files = repo.read(clean), repo.read(buggy)
    bug = {path for path in {*clean_files, *buggy_files} if clean_files.get(path) != buggy_files.get(path)}
    clean = repo.apply(clean, patches["test_patch"], "`test_patch`")
    before, clean_files = clean_files, repo.read(clean)
    of_tests = {path for path in {*before, *clean_files} if before.get(path) != clean_files.get(path)}
    missing = sorted(path for path in listed if path not in clean_files)
    if missing:
        raise TreeError("tests", f"the repository has no {', '.join(missing[:5])}")
    examples, unseen = _examples(repo, clean_files, arguments["doctests"])
    tests = {*arguments["test_files"], *unseen, *of_tests}
    guard = Guard(tests, bug)
    if patches["patch"]:
        _check_that_the_bug_stays(guard, bug, tests, unseen)
    hidden = {path for path in arguments["hidden"] if guard.belongs(path) or (path in tests and path.endswith(".py"))}
    agent_files = {path: entry for path, entry in buggy_files.items() if path not in hidden}
    agent = repo.write(agent_files)
    listings = {"clean": clean_files, "agent": agent_files}
    noted = {"tests": sorted(tests), "bug": sorted(bug), "doctests": examples}
    trees = {"repo": repo.path, "agent": agent, "files": listings, **noted}
    fix = repo.diff(agent, clean, but=hidden)
    texts = {
        "trees.json": json.dumps(trees),
        "agent": f"{repo.path}\n{agent}\n{manifest.of_tree(agent_files)}\n",
        "fix.patch": fix,
    }
    for name, text in texts.items():
        with open(os.path.join(arguments["task"], name), "w", encoding="utf-8") as file:
            file.write(text)
    return {}


def _check_that_the_bug_stays(guard: Guard, bug: set[str], tests: set[str], unseen: dict[str, list[str]]) -> None:
    """Refuse a task if its tests would run without the bug, whatever the agent does, or if the agent could change its
    tests."""
    mixed = sorted(path for path in bug & tests if path.endswith(".py") and not guard.belongs(path))
    if mixed and mixed[0] in unseen:
        names = ", ".join(unseen[mixed[0]][:5])
        raise TreeError(
            "tests", f"{mixed[0]}, which has the bug, has no docstring with examples for the doctest {names}"
        )
    if mixed:
        raise TreeError(
            "tests", f"{mixed[0]} has both the bug and tests of the task, which can't be kept from the agent"
        )
    if not bug:
        raise TreeError("patch", "`patch` changes nothing")
    if all(map(guard.protects, bug)):
        raise TreeError(
            "patch",
            f"`patch` changes only files of the tests ({', '.join(sorted(bug)[:5])}); they are as in the clean tree "
            "when the tests are run, so that there is no bug",
        )


def _examples(
    repo: BareRepository, clean: Tree, doctests: dict[str, list[str]]
) -> tuple[dict[str, tuple[str, int]], dict[str, list[str]]]:
    """Return the docstrings of doctests in the clean tree, by node id, and the names without a docstring, by file."""
    found: dict[str, tuple[str, int]] = {}
    unseen: dict[str, list[str]] = {}
    for path, names in doctests.items():
        try:
            module = ast.parse(repo.git("cat-file", "blob", clean[path][1]))
        except (SyntaxError, ValueError):
            unseen[path] = names
            continue
        for name in names:
            text = docstring(module, path, name)
            if text:
                found[f"{path}::{name}"] = text
            else:
                unseen.setdefault(path, []).append(name)
    return found, unseen


def _with_removed_tests(repo: BareRepository, listed: set[str]) -> str:
    """Store the base's tree with the listed tests' files that only the parent commit has, and return its id.
    SWE-smith's last commit removes such files."""
    files = repo.read(BASE)
    try:
        before = repo.read(BASE + "^1")
    except subprocess.CalledProcessError:
        before = {}
    files.update({path: before[path] for path in listed if path in before and path not in files})
    return repo.write(files)


def check_out(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Unpack the base commit's tree at `to`, for an installer."""
    repo = BareRepository(arguments["repo"])
    answer = repo.archive(BASE, os.path.dirname(arguments["to"]))
    try:
        with tarfile.open(answer["tar"], "r:", encoding="utf-8", errors="surrogateescape") as tar:
            tar.extractall(arguments["to"])
    finally:
        os.unlink(answer["tar"])
    return {}


def take_work(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Read the agent's work from `stream`, as a tar of the checkout. Make a patch of it, and the tree under test.

    All files are made in the directory `work`; the patch is its file `patch`. Returns the answer of `_pack_tested`.
    """
    trees = _Trees(arguments)
    repo, before = trees.repo, trees.files("agent")
    blobs = Blobs(repo.objects, {name for mode, name in before.values() if mode != MODULE})
    after = _read_work(stream, blobs, arguments["max_workspace"])
    clean = trees.files("clean")
    added = [path for path in after if path not in before and path not in clean]
    for path in repo.find_ignored(added, _gitignores(repo, after, blobs)):
        del after[path]
    fixed = _not_in_patches(repo, before)
    for path in in_the_way(after, fixed):
        del after[path]
    after.update(fixed)
    patch = repo.diff(trees.agent, repo.write(after), most=arguments["max_patch"])
    with open(os.path.join(arguments["work"], "patch"), "w", encoding="utf-8", newline="") as file:
        file.write(patch)
    return _pack_tested(arguments, trees, after)


def _read_work(stream: IO[bytes], blobs: Blobs, most: int) -> Tree:
    """Store the files of an uncompressed tar that git can keep, and return them. No file is unpacked or held in memory.

    Each hard link becomes a file with the whole content, and its whole size counts towards `most` bytes.
    """
    seen: Tree = {}
    left = most
    with tarfile.open(fileobj=stream, mode="r|", bufsize=BLOCK, encoding="utf-8", errors="surrogateescape") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # or the memory of all headers would grow without bound
            path = _path(member.name)
            if member.islnk():
                entry = seen[_path(member.linkname)]
            elif member.issym():
                target = os.fsencode(member.linkname)
                if not _is_text(target):
                    continue  # see `_not_in_patches`
                entry = LINK, blobs.add(io.BytesIO(target), len(target))
            elif member.isreg():
                if member.size > left:
                    raise _too_large("checkout", most)
                content = cast("IO[bytes]", tar.extractfile(member))
                entry = PROGRAM if member.mode & 0o100 else FILE, blobs.add(content, member.size)
            else:
                continue
            left -= tarfile.BLOCKSIZE + blobs.sizes[entry[1]]
            if left < 0:
                raise _too_large("checkout", most)
            if not path:
                raise ValueError(f"the top of the tree as a file: {member.name!r}")
            seen[path] = entry
    kept = {path: entry for path, entry in seen.items() if _can_be_kept(path, entry[0])}
    long = max((len(os.fsencode(path)) for path in kept), default=0)
    if long > MAX_PATH:
        raise TreeError("work", f"a file's path has {long} bytes, more than {MAX_PATH}")
    return kept


def _not_in_patches(repo: BareRepository, files: Tree) -> Tree:
    """Return the files that a text patch can't change, and which stay as they are: git's submodules, and links whose
    target is not UTF-8, because git has no binary form for links."""
    targets = repo.contents({name for mode, name in files.values() if mode == LINK})
    odd = {name for name, target in targets.items() if not _is_text(target)}
    return {path: (mode, name) for path, (mode, name) in files.items() if mode == MODULE or name in odd}


def _path(name: str) -> str:
    """Return the path of an archive's member, or "" for the top.

    Raises:
        ValueError: our archives never have such a path.
    """
    path = "" if name == "." else name[2:] if name.startswith("./") else name
    if path and (not {"", ".", ".."}.isdisjoint(path.split("/")) or "\0" in path):
        raise ValueError(f"not the path of a file: {name!r}")
    return path


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _can_be_kept(path: str, mode: str) -> bool:
    """Return whether git accepts an entry. Files of nested repositories are kept, except for their `.git`."""
    parts = path.casefold().split("/")
    return ".git" not in parts and not (mode == LINK and ".gitmodules" in parts)


def _gitignores(repo: BareRepository, files: Tree, blobs: Blobs) -> dict[str, bytes]:
    """Return the contents of the .gitignore files, by path."""
    names = {
        path: name for path, (mode, name) in files.items() if os.path.basename(path) == ".gitignore" and mode != LINK
    }
    if sum(blobs.sizes[name] for name in names.values()) > MAX_GITIGNORES:
        raise _too_large(".gitignore files", MAX_GITIGNORES)
    contents = repo.contents(set(names.values()))
    return {path: contents[name] for path, name in names.items()}


def _too_large(what: str, most: int) -> TreeError:
    return TreeError("too_large", f"more than {most} bytes: the {what}")


def give_tests(arguments: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Read a recorded patch from `stream`, and make the tree under test of it. Return the answer of `_pack_tested`."""
    trees = _Trees(arguments)
    work = trees.repo.apply(trees.agent, stream.read().decode("utf-8", "surrogateescape"), "the patch")
    return _pack_tested(arguments, trees, trees.repo.read(work))


def _pack_tested(arguments: dict[str, Any], trees: _Trees, work: Tree) -> dict[str, Any]:
    """Make a tar of the tree under test: the agent's work with the original tests, without files that would hide other
    modules from Python.

    In the answer, `restored` and `removed` list the agent's changes that were undone, `digest` is the digest of the
    unpacked tar, and `doctests` has the docstrings. The argument `more` has texts of additional files, by path.
    """
    clean, start = trees.files("clean"), trees.files("agent")
    guard = trees.guard
    kept = {path: entry for path, entry in clean.items() if guard.protects(path)}
    tested = {path: entry for path, entry in work.items() if not guard.protects(path)}
    restored = sorted(
        path for path in set(work) | set(kept) if path not in tested and is_undone(path, work, start, kept)
    )
    intruders = shadows(tested, clean, kept, arguments["import_path"], _modules(arguments["modules"]))
    blocked = in_the_way(tested, kept)
    for path in intruders | blocked:
        del tested[path]
    tested.update(kept)
    blobs = Blobs(trees.repo.objects, set())
    for path, text in arguments.get("more", {}).items():
        tested[path] = FILE, blobs.add(io.BytesIO(text.encode()), len(text.encode()))
    answer = trees.repo.archive(trees.repo.write(tested), arguments["work"])
    removed = sorted(intruders | blocked)
    named = {"restored": restored[:NAMED], "removed": removed[:NAMED]}
    return dict(answer, digest=manifest.of_tree(tested), doctests=trees.doctests, **named)


def _modules(path: str) -> set[str]:
    """Return the top-level modules of the test environment, from the notes of `dependencies.py`."""
    with open(path, encoding="utf-8") as file:
        return set(json.load(file)["modules"])


class _Trees:
    """A task's trees, as `make_trees` wrote them."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        with open(os.path.join(arguments["task"], "trees.json"), encoding="utf-8") as file:
            self._noted = json.load(file)
        objects = os.path.join(arguments["work"], "objects")
        os.makedirs(objects)
        self.repo = BareRepository(self._noted["repo"], objects)
        self.agent: str = self._noted["agent"]
        self.guard = Guard(self._noted["tests"], set(self._noted["bug"]))
        self.doctests: dict[str, list[Any]] = self._noted["doctests"]

    def files(self, name: str) -> Tree:
        """Return the files of the tree `clean` or `agent`."""
        return {path: (mode, blob) for path, (mode, blob) in self._noted["files"][name].items()}


def _git_message(error: subprocess.CalledProcessError) -> str:
    text = error.stderr.decode("utf-8", "replace").strip() or f"it ended with status {error.returncode}"
    return text[-1000:]


OPERATIONS = {
    "make_repository": make_repository,
    "import_project": import_project,
    "make_patch": make_patch,
    "pack_sources": pack_sources,
    "make_trees": make_trees,
    "check_out": check_out,
    "take_work": take_work,
    "give_tests": give_tests,
}


def confine(work: str, cpu_s: int) -> None:
    """Make the directory `work` for an agent's work, and limit the processor time and the memory of each process."""
    os.mkdir(work, 0o700)
    tempfile.tempdir = work
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def main() -> int:
    """Run one operation."""
    arguments = json.loads(sys.stdin.buffer.readline())
    if "work" in arguments:
        confine(arguments["work"], arguments["cpu_s"])
    try:
        answer = OPERATIONS[sys.argv[-1]](arguments, sys.stdin.buffer)
    except TreeError as refused:
        answer = {"error": refused.code, "message": str(refused)}
    except FileNotFoundError as error:
        if error.filename != "git":
            raise
        answer = {"error": "git", "message": "there is no git in the sandbox"}
    except subprocess.CalledProcessError as error:
        answer = {"error": "failed", "message": f"git {' '.join(error.cmd[1:3])}: {_git_message(error)}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
