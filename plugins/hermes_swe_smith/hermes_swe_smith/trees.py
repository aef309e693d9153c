"""Builds and compares a task's trees in a private bare repository. Sent into the sandbox as source.

Standard library and git, Python >= 3.8. It runs as the preparation user, who shares nothing with the slots. There is
never a working tree: trees are made in temporary indexes, an agent's work arrives as a tar whose members are hashed and
never unpacked, and what leaves is a tar again. So nothing that an agent wrote (configuration, attributes, hooks, links,
odd names) is ever acted upon.

Files are the repository's bytes: no line-end conversion, no filter, no keyword, no `export-ignore`.

Called with an operation's name as the last argument; standard input is a JSON line of arguments, then a payload.
Prints one JSON line; `{"error": code, "message": text}` for what the caller has to deal with.
"""

# ruff: noqa: PTH102, PTH103, PTH108, PTH118, PTH120, PTH123
# (pathlib would be one import more)

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from typing import TYPE_CHECKING, Any

from hermes_swe_smith.guard import Guard, in_the_way, shadows, undone

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Iterable

    Entry = tuple[str, str]  # mode and object id, as git has them
    Tree = dict[str, Entry]  # path to entry, of every file of a tree

FILE, PROGRAM, LINK, MODULE = "100644", "100755", "120000", "160000"

ATTRIBUTES = "* -text !eol -ident !filter !working-tree-encoding -export-ignore -export-subst\n"
"""Stands above whatever a tree's own .gitattributes say."""

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
"""What running tests leaves in a checkout: not part of an agent's work, unless the tree has it already."""


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
"""Keeps git from reading anybody else's configuration, and from asking."""


class Refused(Exception):
    """Something that the caller has to deal with: a code and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Repository:
    """A bare repository, and git kept from reading anybody's configuration."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "XDG_")) or name in KEPT
        }
        self._environment.update(
            OWN_CONFIGURATION_ONLY,
            GIT_DIR=path,
            HOME=path,
        )

    def git(self, *words: str, data: bytes = b"", ok: tuple[int, ...] = (0,), **env: str) -> bytes:
        """Run git and give what it prints; another status than `ok` raises `subprocess.CalledProcessError`."""
        settings = ["core.protectNTFS=false", "core.protectHFS=false", "core.quotePath=true", "gc.auto=0"]
        options = [word for setting in settings for word in ("-c", setting)]
        done = subprocess.run(
            ["git", *options, *words],
            input=data,
            capture_output=True,
            cwd=env.get("GIT_WORK_TREE", self.path),
            env=dict(self._environment, **env),
            check=False,
        )
        if done.returncode not in ok:
            raise subprocess.CalledProcessError(done.returncode, ["git", *words], done.stdout, done.stderr)
        return done.stdout

    def read(self, tree: str) -> Tree:
        """Every file of a tree."""
        files = {}
        for record in self.git("ls-tree", "-r", "-z", tree).split(b"\0")[:-1]:
            head, path = record.split(b"\t", 1)
            mode, _, name = head.decode().split(" ")
            files[os.fsdecode(path)] = (mode, name)
        return files

    def write(self, files: Tree) -> str:
        """The id of the tree of these files."""
        records = [f"{mode} {name}\t".encode() + os.fsencode(path) + b"\0" for path, (mode, name) in files.items()]
        with tempfile.TemporaryDirectory() as scratch:
            index = os.path.join(scratch, "index")
            self.git("update-index", "-z", "--index-info", data=b"".join(records), GIT_INDEX_FILE=index)
            return self.git("write-tree", "--missing-ok", GIT_INDEX_FILE=index).decode().strip()

    def patched(self, tree: str, patch: str, what: str, reverse: bool = False) -> str:
        """The id of a tree with a patch applied to it."""
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
                raise Refused("patch", f"{what} does not apply: {_said(error)}") from error
            return self.git("write-tree", "--missing-ok", GIT_INDEX_FILE=index).decode().strip()

    def store(self, contents: list[bytes]) -> None:
        """Put blobs into the repository, byte for byte."""
        if not contents:
            return
        with tempfile.TemporaryDirectory() as scratch:
            paths = [os.path.join(scratch, str(number)) for number in range(len(contents))]
            for path, content in zip(paths, contents):  # noqa: B905 - not on 3.8
                with open(path, "wb") as file:
                    file.write(content)
            listing = "".join(path + "\n" for path in paths).encode()
            self.git("hash-object", "-w", "--no-filters", "--stdin-paths", data=listing)

    def diff(self, before: str, after: str, but: Iterable[str] = ()) -> str:
        """A patch from one tree to the other, but not of some files, that `git apply` takes; always text."""
        options = ["-p", "--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv"]
        words = ["diff-tree", *options, before, after, "--", *(f":(exclude,literal){path}" for path in but)]
        try:
            return self.git(*words).decode("utf-8")
        except UnicodeDecodeError:  # a text file in another encoding: git's binary form is plain ASCII
            with tempfile.TemporaryDirectory() as scratch:
                attributes = os.path.join(scratch, "attributes")
                with open(attributes, "w", encoding="ascii") as file:
                    file.write("* -diff\n")
                setting = "core.attributesFile=" + attributes
                return self.git("-c", setting, *words).decode("utf-8")

    def ignored(self, paths: Iterable[str], gitignores: dict[str, bytes]) -> set[str]:
        """Which of the paths the given .gitignore files, and `LEFT_BEHIND`, exclude."""
        # "./" keeps a leading colon from being taken for pathspec magic.
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
        """A tar of the tree as a new file in the directory: its path."""
        descriptor, path = tempfile.mkstemp(suffix=".tar", dir=directory)
        os.close(descriptor)
        try:
            self.git("-c", "tar.umask=0022", "archive", "--format=tar", "-o", path, tree)
        except BaseException:
            os.unlink(path)
            raise
        return {"tar": path}


def make_repository(arguments: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """Make the bare repository `repo` from a bundle or a URL, note its base commit, and give some files' texts."""
    repo = Repository(arguments["repo"])
    os.makedirs(repo.path)
    try:
        repo.git("init", "-q", "--bare", "--template=", repo.path)
        os.mkdir(os.path.join(repo.path, "info"))
        for name, content in (("attributes", ATTRIBUTES), ("exclude", LEFT_BEHIND)):
            with open(os.path.join(repo.path, "info", name), "w", encoding="utf-8") as file:
                file.write(content)
        commit = arguments.get("commit")
        if arguments.get("bundle"):
            repo.git("bundle", "unbundle", arguments["bundle"])
        else:
            commit = _fetch(repo, arguments["url"], commit)
        repo.git("update-ref", BASE, repo.git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip())
        return {"files": _texts(repo, arguments["read"])}
    except subprocess.CalledProcessError as error:
        raise Refused("repository", _said(error)) from error


def _texts(repo: Repository, paths: list[str]) -> dict[str, str]:
    """The texts of those of the files that there are."""
    tree = repo.read(BASE)
    entries = {path: tree[path] for path in paths if path in tree and tree[path][0] in (FILE, PROGRAM)}
    return {path: repo.git("cat-file", "blob", name).decode("utf-8", "replace") for path, (_, name) in entries.items()}


def _fetch(repo: Repository, url: str, commit: str | None) -> str:
    """Fetch one commit and its parent, or everything if the server gives out nothing less. Gives the commit's name."""
    try:
        repo.git("fetch", "-q", "--no-tags", "--depth=2", url, commit or "HEAD")
        return commit or "FETCH_HEAD"
    except subprocess.CalledProcessError:
        repo.git("fetch", "-q", "--no-tags", url, "+HEAD:refs/hermes/head", "+refs/heads/*:refs/remote/*")
        return commit or "refs/hermes/head"


def make_trees(arguments: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """Make the task's trees; their files go to `trees.json` in the directory `task`, the agent's tree's id to `agent`.

    `clean` passes every test. `buggy` has the bug. `agent` is `buggy` without the hidden files. What makes `clean` of
    it, those files aside, is the reference solution, `fix.patch`.
    """
    repo = Repository(arguments["repo"])
    patches = json.loads(payload)
    base = repo.git("rev-parse", BASE + "^{tree}").decode().strip()
    to_buggy = arguments["patch_is"] == "bug"
    if arguments["base_is"] == "clean":
        clean, buggy = base, repo.patched(base, patches["patch"], "`patch`", reverse=not to_buggy)
    else:
        clean, buggy = repo.patched(base, patches["patch"], "`patch`", reverse=to_buggy), base
    clean = repo.patched(clean, patches["test_patch"], "`test_patch`")
    clean_files, buggy_files = repo.read(clean), repo.read(buggy)
    missing = [path for path in arguments["test_files"] if path not in clean_files]
    if missing and arguments["base_is"] == "buggy":
        clean_files.update(_from_parent(repo, missing))
        clean = repo.write(clean_files)
        missing = [path for path in missing if path not in clean_files]
    if missing:
        raise Refused("tests", f"the repository has no {', '.join(missing[:5])}")
    hidden = set(arguments["hidden"])
    agent_files = {path: entry for path, entry in buggy_files.items() if path not in hidden}
    agent = repo.write(agent_files)
    fix = repo.diff(agent, clean, but=hidden)
    if arguments["has_fix"] and not fix:
        raise Refused("patch", "`patch` changes nothing but hidden test files")
    listings = {"clean": clean_files, "buggy": buggy_files, "agent": agent_files}
    trees = {"repo": repo.path, "agent": agent, "files": listings}
    texts = {"trees.json": json.dumps(trees), "agent": f"{repo.path}\n{agent}\n", "fix.patch": fix}
    for name, text in texts.items():
        with open(os.path.join(arguments["task"], name), "w", encoding="utf-8") as file:
            file.write(text)
    return {}


def _from_parent(repo: Repository, paths: list[str]) -> Tree:
    """Test files from the commit before: SWE-smith's branches end with one that removes them."""
    try:
        before = repo.read(BASE + "^1")
    except subprocess.CalledProcessError:
        return {}
    return {path: before[path] for path in paths if path in before}


def check_out(arguments: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """Unpack the base commit's tree at `to`, for an installer."""
    repo = Repository(arguments["repo"])
    answer = repo.archive(BASE, os.path.dirname(arguments["to"]))
    try:
        with tarfile.open(answer["tar"], encoding="utf-8", errors="surrogateescape") as tar:
            tar.extractall(arguments["to"])
    finally:
        os.unlink(answer["tar"])
    return {}


def take_work(arguments: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """The agent's work, from a tar of its checkout, as a patch of the agent's tree; and the tested tree (`_tested`)."""
    trees = _Trees(arguments)
    repo, before = trees.repo, trees.files("agent")
    after, contents, gitignores = _read_tar(payload)
    added = [path for path in after if path not in before]
    for path in repo.ignored(added, gitignores):
        after.pop(path, None)
    known = {name for _, name in before.values()}
    new = {name for _, name in after.values()} - known
    repo.store([content for name, content in contents.items() if name in new])
    after.update({path: entry for path, entry in before.items() if entry[0] == MODULE})
    try:
        tree = repo.write(after)
    except subprocess.CalledProcessError as error:
        raise Refused("work", f"the checkout holds what git can't keep: {_said(error)}") from error
    patch = repo.diff(trees.agent, tree)
    if len(patch) > arguments["max_bytes"]:
        raise Refused("too_large", f"the patch has {len(patch)} bytes, more than {arguments['max_bytes']}")
    return dict(_tested(arguments, trees, after), patch=patch)


def _read_tar(payload: bytes) -> tuple[Tree, dict[str, bytes], dict[str, bytes]]:
    """The files of a tar as entries, their contents by object id, and its .gitignore files. Nothing is unpacked."""
    files: Tree = {}
    contents: dict[str, bytes] = {}
    gitignores: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(payload), encoding="utf-8", errors="surrogateescape") as tar:
        for member in tar:
            path = os.path.normpath(member.name)
            parts = path.split("/")
            if ".git" in (part.casefold() for part in parts) or ".." in parts or path.startswith("/"):
                continue
            if member.issym():
                if parts[-1].casefold() == ".gitmodules":
                    continue
                mode, content = LINK, os.fsencode(member.linkname)
            elif member.isreg() or member.islnk():
                file = tar.extractfile(member)
                if file is None:
                    continue
                mode, content = PROGRAM if member.mode & 0o100 else FILE, file.read()
                if parts[-1] == ".gitignore":
                    gitignores[path] = content
            else:
                continue
            name = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            files[path] = (mode, name)
            contents[name] = content
    return files, contents, gitignores


def give_tests(arguments: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """The tested tree of a recorded patch, the payload."""
    trees = _Trees(arguments)
    work = trees.repo.patched(trees.agent, payload.decode("utf-8", "surrogateescape"), "the patch")
    return _tested(arguments, trees, trees.repo.read(work))


def _tested(arguments: dict[str, Any], trees: _Trees, work: Tree) -> dict[str, Any]:
    """A tar of what is tested: the agent's work, the tests as they were, and nothing that takes their place.

    `restored` and `removed` name what was undone of the work.
    """
    clean, buggy, start = (trees.files(name) for name in ("clean", "buggy", "agent"))
    bug = {path for path in set(clean) | set(buggy) if clean.get(path) != buggy.get(path)}
    guard = Guard(arguments["test_files"], bug)
    kept = {path: entry for path, entry in clean.items() if guard.protects(path)}
    tested = {path: entry for path, entry in work.items() if not guard.protects(path)}
    restored = sorted(path for path in set(work) | set(kept) if path not in tested and undone(path, work, start, kept))
    intruders = shadows(tested, clean, arguments["import_path"], _modules(arguments["modules"]))
    blocked = in_the_way(tested, kept)
    for path in intruders | blocked:
        del tested[path]
    tested.update(kept)
    answer = trees.repo.archive(trees.repo.write(tested), arguments["task"])
    return dict(answer, restored=restored, removed=sorted(intruders | blocked))


def _modules(path: str) -> set[str]:
    """The top-level modules of the test environment, as `dependencies.py` noted them."""
    with open(path, encoding="utf-8") as file:
        return set(json.load(file)["modules"])


class _Trees:
    """What `make_trees` noted of a task."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        with open(os.path.join(arguments["task"], "trees.json"), encoding="utf-8") as file:
            self._noted = json.load(file)
        self.repo = Repository(self._noted["repo"])
        self.agent: str = self._noted["agent"]

    def files(self, name: str) -> Tree:
        """The files of the tree `clean`, `buggy` or `agent`."""
        return {path: (mode, blob) for path, (mode, blob) in self._noted["files"][name].items()}


def _said(error: subprocess.CalledProcessError) -> str:
    text = error.stderr.decode("utf-8", "replace").strip() or f"git ended with status {error.returncode}"
    return text[-1000:]


OPERATIONS = {
    "make_repository": make_repository,
    "make_trees": make_trees,
    "check_out": check_out,
    "take_work": take_work,
    "give_tests": give_tests,
}


def main() -> int:
    """One operation."""
    arguments = json.loads(sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read()
    try:
        answer = OPERATIONS[sys.argv[-1]](arguments, payload)
    except Refused as refused:
        answer = {"error": refused.code, "message": str(refused)}
    except FileNotFoundError as error:
        if error.filename != "git":
            raise
        answer = {"error": "git", "message": "there is no git in the sandbox"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
