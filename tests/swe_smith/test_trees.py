"""The trees of a task, what is taken of an agent's work, and what is tested: on real repositories, no sandbox."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from hermes_swe_smith import manifest, trees
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hermes_core.sandbox.guest import archives

BUG = """\
diff --git a/src/pkg/core.py b/src/pkg/core.py
--- a/src/pkg/core.py
+++ b/src/pkg/core.py
@@ -1,2 +1,2 @@
 def double(x):
-    return 2 * x
+    return 3 * x
"""

FIX = BUG.replace("-    return 2 * x\n+    return 3 * x", "-    return 3 * x\n+    return 2 * x")

FILES = {
    "src/pkg/__init__.py": b"",
    "src/pkg/core.py": b"def double(x):\n    return 2 * x\n",
    "src/pkg/crlf.txt": b"one\r\ntwo\r\n",
    "tests/conftest.py": b"X = 1\n",
    "tests/test_core.py": b"def test_double(): pass\n",
    "tests/test_other.py": b"def test_other(): pass\n",
    "tests/data/table.csv": b"1,2\n",
    "setup.cfg": b"[tool:pytest]\n",
    ".gitignore": b"*.log\nbuild/\n__pycache__/\n",
    ".gitattributes": b"*.txt text eol=lf\ntests/data export-ignore\n*.py ident filter=nothing diff=odd\n",
}
ENV = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(where, *words, data=None):
    done = subprocess.run(["git", *words], cwd=where, env=ENV, input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A repository as its authors have it."""
    root = tmp_path_factory.mktemp("origin") / "project"
    write(root, FILES)
    git(root, "init", "-q", "-b", "main")
    (root / ".git/info").mkdir(exist_ok=True)
    (root / ".git/info/attributes").write_text("* -text -ident\n")  # its authors have line ends of every kind
    git(root, "add", "-A", "-f")
    git(root, "commit", "-q", "-m", "clean")
    return root


@pytest.fixture
def bench(tmp_path, origin):
    return Bench(tmp_path, origin)


class Bench:
    """One task's trees, made the way a sandbox makes them."""

    def __init__(self, tmp_path, origin, ref="main", **arguments):
        self.tmp = tmp_path
        self.repo = str(tmp_path / "private" / "repo.git")
        self.task = str(tmp_path / "task")
        (tmp_path / "private").mkdir(exist_ok=True)
        os.mkdir(self.task)
        bundle = tmp_path / "source.bundle"
        git(origin, "bundle", "create", "-q", str(bundle), ref)
        commit = git(origin, "rev-parse", ref).strip()
        trees.make_repository({"repo": self.repo, "bundle": str(bundle), "commit": commit, "read": []}, NOTHING)
        patches = {"patch": arguments.pop("patch", BUG), "test_patch": arguments.pop("test_patch", "")}
        self.tests = arguments.pop("test_files", ["tests/test_core.py", "tests/test_other.py"])
        hidden = arguments.pop("hidden", ["tests/test_core.py"])
        defaults = {"doctests": {}, "base_is": "clean", "patch_is": "bug", "test_files": self.tests, "hidden": hidden}
        defaults["has_test_patch"] = False
        self.made = trees.make_trees(
            {"repo": self.repo, "task": self.task, **defaults, **arguments}, io.BytesIO(json.dumps(patches).encode())
        )
        notes = tmp_path / "notes.json"
        notes.write_text(json.dumps({"modules": ["pytest", "_pytest", "json", "typing"]}))

    def checkout(self):
        """The agent's checkout, as it gets it."""
        repo, agent, digest = Path(self.task, "agent").read_text().splitlines()
        return self.unpack({**trees.BareRepository(repo).archive(agent, self.task), "digest": digest}, "slot")

    @property
    def fix(self):
        return Path(self.task, "fix.patch").read_text()

    def unpack(self, answer, name):
        root = self.tmp / name
        shutil.rmtree(root, ignore_errors=True)
        with tarfile.open(answer["tar"], "r:") as tar:
            tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # Python 3.11.2 has no filters
            tar.extractall(root)
        os.unlink(answer["tar"])
        assert manifest.of_directory(str(root)) == answer["digest"]
        return root

    def arguments(self):
        """For one operation."""
        return {
            "task": self.task,
            "import_path": ["src"],
            "modules": str(self.tmp / "notes.json"),
            "cpu_s": 60,
            "work": tempfile.mkdtemp(dir=self.tmp),
        }

    def take(self, root, max_bytes=1 << 20, max_workspace=64 << 20):
        """The agent's work: what is tested of it, and the answer with the patch."""
        return self.take_tar(packed(root), max_bytes, max_workspace)

    def take_tar(self, data, max_bytes=1 << 20, max_workspace=64 << 20):
        """The same from the bytes of a tar."""
        arguments = {**self.arguments(), "max_patch": max_bytes, "max_workspace": max_workspace}
        before = everything(self.repo)
        answer = trees.take_work(arguments, io.BytesIO(data))
        assert everything(self.repo) == before, "something stays of the work"
        patch = Path(arguments["work"], "patch").read_bytes().decode()
        return contents(self.unpack(answer, "tested")), {**answer, "patch": patch}

    def rescore(self, patch):
        """What is tested of a recorded patch."""
        answer = trees.give_tests(self.arguments(), io.BytesIO(patch.encode("utf-8", "surrogateescape")))
        return contents(self.unpack(answer, "again"))


NOTHING = io.BytesIO()


def packed(root):
    """A tar of a directory as the guest makes it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writer, 1)
        os._exit(archives.pack(str(root), 1 << 30) != {})
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return data


def everything(folder):
    return sorted(str(path) for path in Path(folder).rglob("*"))


def contents(root):
    return {
        str(path.relative_to(root)): path.read_bytes() if not path.is_symlink() else os.fsencode(os.readlink(path))
        for path in root.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


BUGGY = {**FILES, "src/pkg/core.py": b"def double(x):\n    return 3 * x\n"}
WITHOUT_HIDDEN = {name: content for name, content in BUGGY.items() if name != "tests/test_core.py"}


def test_the_agent_gets_the_buggy_tree_without_hidden_tests_byte_for_byte(bench):
    assert contents(bench.checkout()) == WITHOUT_HIDDEN


def test_nothing_done_is_an_empty_patch_and_the_tests_are_there_again(bench):
    tested, answer = bench.take(bench.checkout())
    assert answer["patch"] == ""
    assert tested == BUGGY
    assert (answer["restored"], answer["removed"]) == ([], [])


def test_the_fix_makes_the_clean_tree(bench):
    root = bench.checkout()
    git(root, "init", "-q")
    git(root, "apply", "-", data=bench.fix.encode())
    assert (root / "src/pkg/core.py").read_bytes() == FILES["src/pkg/core.py"]
    assert bench.rescore(bench.fix) == FILES


def same_both_ways(bench, root):
    """What is tested of the work, after checking that its recorded patch gives the same."""
    tested, answer = bench.take(root)
    assert bench.rescore(json.loads(json.dumps(answer["patch"]))) == tested
    return tested, answer


def test_any_change_survives_as_a_patch(bench):
    root = bench.checkout()
    changes = {
        "src/pkg/new.py": b"new\n",
        "src/pkg/no_line_end.py": b"x = 1",
        "src/pkg/empty.py": b"",
        "src/pkg/latin.py": "# käse\n".encode("latin-1"),
        "src/pkg/crlf.txt": b"one\r\nthree\r\n",
        "src/pkg/mixed.txt": b"a\r\nb\n",
        "src/pkg/data.bin": bytes(range(256)),
        "src/pkg/a name with 'quotes\" and $ and \\.py": b"odd\n",
        "src/pkg/new\nline.py": b"odd\n",
        "src/pkg/:(glob)*.py": b"odd\n",
        "src/pkg/--all": b"odd\n",
        "src/pkg/käse.py": b"odd\n",
    }
    write(root, changes)
    (root / os.fsdecode(b"src/pkg/\xff.py")).write_bytes(b"odd\n")
    (root / "src/pkg/link").symlink_to("/etc/passwd")
    (root / "src/pkg/__init__.py").unlink()
    tested, _ = same_both_ways(bench, root)
    expected = {**BUGGY, **changes, os.fsdecode(b"src/pkg/\xff.py"): b"odd\n", "src/pkg/link": b"/etc/passwd"}
    del expected["src/pkg/__init__.py"]
    assert tested == expected


def test_files_may_become_directories_links_and_programs(bench):
    root = bench.checkout()
    (root / "src/pkg/core.py").unlink()
    write(root, {"src/pkg/core.py/inside.py": b"1\n"})
    (root / "src/pkg/crlf.txt").unlink()
    (root / "src/pkg/crlf.txt").symlink_to("core.py")
    (root / "src/pkg/__init__.py").chmod(0o755)
    tested, work = same_both_ways(bench, root)
    assert tested["src/pkg/core.py/inside.py"] == b"1\n"
    assert tested["src/pkg/crlf.txt"] == b"core.py"
    assert "new mode 100755" in work["patch"]


def test_what_a_test_run_leaves_and_what_is_ignored_is_no_work(bench):
    root = bench.checkout()
    write(
        root,
        {
            "src/pkg/__pycache__/core.cpython-311.pyc": b"x",
            ".pytest_cache/v/x": b"x",
            "debug.log": b"x",
            "build/lib/pkg/core.py": b"x",
            ".venv/.gitignore": b"*\n",
            ".venv/lib/thing.py": b"x",
        },
    )
    assert bench.take(root)[1]["patch"] == ""


def test_the_agents_own_gitignore_counts(bench):
    root = bench.checkout()
    write(root, {"src/pkg/made.log": b"x\n", ".gitignore": b"*.tmp\n", "note.tmp": b"x\n"})
    tested, _ = same_both_ways(bench, root)
    assert tested["src/pkg/made.log"] == b"x\n"
    assert "note.tmp" not in tested


def test_tracked_files_are_work_even_where_they_are_ignored(bench):
    root = bench.checkout()
    write(root, {".gitignore": b"*\n"})
    (root / "src/pkg/core.py").write_bytes(FILES["src/pkg/core.py"])
    tested, _ = same_both_ways(bench, root)
    assert tested["src/pkg/core.py"] == FILES["src/pkg/core.py"]


def test_what_the_reference_solution_has_is_work_even_where_it_is_ignored(tmp_path, origin):
    bug = "diff --git a/build/made.py b/build/made.py\nnew file mode 100644\n--- /dev/null\n+++ b/build/made.py\n"
    fix = bug + "@@ -0,0 +1 @@\n+X = 1\n"
    bench = Bench(tmp_path, origin, patch=fix, patch_is="fix", base_is="buggy", has_test_patch=True)
    root = bench.checkout()
    write(root, {"build/made.py": b"X = 1\n", "build/more.py": b"X = 2\n"})
    tested, answer = bench.take(root)
    assert tested["build/made.py"] == b"X = 1\n" and "build/more.py" not in tested
    assert bench.rescore(answer["patch"]) == tested


@pytest.mark.parametrize("done", ["nothing", "removed", "replaced"])
def test_a_link_whose_target_is_no_text_stays(tmp_path, origin, done):
    project = tmp_path / "project"
    git(tmp_path, "clone", "-q", str(origin), "project")
    os.symlink(b"\xff", project / "src/odd")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "a link")
    bench = Bench(tmp_path, project)
    root = bench.checkout()
    link = root / "src/odd"
    if done != "nothing":
        link.unlink()
    if done == "replaced":
        link.symlink_to(os.fsdecode(b"\xfe"))
        write(root, {"src/pkg/core.py": FILES["src/pkg/core.py"]})
    tested, answer = bench.take(root)
    assert tested["src/odd"] == b"\xff" and ("core.py" in answer["patch"]) == (done == "replaced")


def test_a_repository_inside_the_checkout_is_files(bench):
    root = bench.checkout()
    write(root, {"src/pkg/sub/x.py": b"1\n", "src/pkg/sub/.git/config": b"[core]\n", "src/.GIT/config": b"x"})
    (root / ".gitmodules").symlink_to("/etc/passwd")
    tested, _ = same_both_ways(bench, root)
    assert tested["src/pkg/sub/x.py"] == b"1\n"
    assert not [name for name in tested if ".git/" in name.lower() or name == ".gitmodules"]


def test_configuration_of_the_agents_git_is_never_read(bench):
    root = bench.checkout()
    git(root, "init", "-q")
    marker = bench.tmp / "ran"
    touch = f"touch {marker}"
    for key in ("core.fsmonitor", "core.hooksPath", "filter.nothing.clean", "diff.odd.command", "diff.odd.textconv"):
        git(root, "config", key, touch)
    (root / ".gitattributes").write_bytes(b"* filter=nothing diff=odd text eol=crlf working-tree-encoding=UTF-16\n")
    write(root, {"src/pkg/new.py": b"x\n"})
    tested, _ = same_both_ways(bench, root)
    assert tested["src/pkg/new.py"] == b"x\n"
    assert not marker.exists()


def test_special_files_and_hard_links(bench):
    root = bench.checkout()
    os.mkfifo(root / "src/pkg/fifo")
    os.link(root / "src/pkg/core.py", root / "src/pkg/same.py")
    tested, _ = same_both_ways(bench, root)
    assert tested["src/pkg/same.py"] == tested["src/pkg/core.py"] == BUGGY["src/pkg/core.py"]
    assert "src/pkg/fifo" not in tested


def test_too_large_a_patch_is_refused(bench):
    root = bench.checkout()
    write(root, {"src/pkg/big.txt": b"x" * 5000})
    with pytest.raises(trees.TreeError) as refused:
        bench.take(root, max_bytes=4000)
    assert refused.value.code == "too_large"


CHEATS = {
    "tests/test_core.py": b"def test_double(): assert True\n",
    "tests/test_other.py": b"",
    "tests/conftest.py": b"import evil\n",
    "tests/data/table.csv": b"9\n",
    "tests/helpers.py": b"evil\n",
    "conftest.py": b"evil\n",
    "src/pkg/conftest.py": b"evil\n",
    "setup.cfg": b"evil\n",
    "pytest.ini": b"evil\n",
    "tox.ini": b"evil\n",
    "pyproject.toml": b"evil\n",
    "src/sitecustomize.py": b"evil\n",
    "src/usercustomize/__init__.py": b"evil\n",
    "src/evil.pth": b"import evil\n",
    "src/pytest.py": b"evil\n",
    "src/_pytest/__init__.py": b"evil\n",
    "src/json.py": b"evil\n",
    "src/typing.cpython-311-x86_64-linux-gnu.so": b"evil\n",
    "src/evil-1.0.dist-info/entry_points.txt": b"[pytest11]\nevil = evil\n",
    "src/evil.egg-info/entry_points.txt": b"[pytest11]\nevil = evil\n",
}


def test_the_tests_are_as_they_were_and_nothing_takes_the_place_of_anything(bench):
    root = bench.checkout()
    write(root, CHEATS)
    write(root, {"src/pkg/honest.py": b"fine\n", "src/helper.py": b"fine\n"})
    tested, answer = same_both_ways(bench, root)
    assert tested == {**BUGGY, "src/pkg/honest.py": b"fine\n", "src/helper.py": b"fine\n"}
    assert set(answer["restored"]) | set(answer["removed"]) == set(CHEATS) - {"src/evil.egg-info/entry_points.txt"}


@pytest.mark.parametrize("kind", ["deleted", "link", "file"])
def test_the_test_directory_comes_back(bench, kind):
    root = bench.checkout()
    subprocess.run(["rm", "-r", str(root / "tests")], check=True)
    if kind == "link":
        (root / "tests").symlink_to("src")
    if kind == "file":
        (root / "tests").write_bytes(b"x")
    tested, _ = same_both_ways(bench, root)
    assert tested == BUGGY


def test_a_directory_in_the_place_of_a_configuration_file(bench):
    root = bench.checkout()
    (root / "setup.cfg").unlink()
    write(root, {"setup.cfg/x.py": b"x\n", "src/pkg/fine.py": b"x\n"})
    tested, _ = same_both_ways(bench, root)
    assert tested == {**BUGGY, "src/pkg/fine.py": b"x\n"}


@pytest.mark.parametrize("path", ["tests/conftest.py", "tests/test_core.py", "tests/data/table.csv", "setup.cfg"])
def test_a_bug_that_restoring_the_tests_would_undo_is_refused(tmp_path, origin, path):
    with pytest.raises(trees.TreeError, match=f"only files of the tests.*{path}") as refused:
        Bench(tmp_path, origin, patch=change_of(path))
    assert refused.value.code == "patch"
    assert not os.listdir(tmp_path / "task")


def change_of(path):
    """A patch that writes something else into a file of one line."""
    old = FILES[path].decode()
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}+[other]\n"


def test_of_a_bug_in_sources_and_tests_the_part_in_the_tests_is_undone(tmp_path, origin):
    bench = Bench(tmp_path, origin, patch=BUG + change_of("tests/conftest.py"))
    root = bench.checkout()
    write(root, {"tests/conftest.py": b"mine\n"})
    tested, answer = bench.take(root)
    assert tested["tests/conftest.py"] == FILES["tests/conftest.py"]
    assert b"3 * x" in tested["src/pkg/core.py"]
    assert answer["restored"] == ["tests/conftest.py"]


def test_tests_that_are_in_the_file_with_the_bug_are_refused(tmp_path, origin):
    with pytest.raises(trees.TreeError, match="both the bug and tests"):
        Bench(tmp_path, origin, test_files=["src/pkg/core.py"], hidden=[], patch=BUG)


def test_tests_beside_the_source_are_restored_but_the_source_is_not(tmp_path, origin):
    bench = Bench(tmp_path, origin, test_files=["src/pkg/__init__.py"], hidden=[], patch=BUG)
    root = bench.checkout()
    write(root, {"src/pkg/test_more.py": b"mine\n", "src/pkg/util.py": b"mine\n"})
    names, _ = bench.take(root)
    assert "src/pkg/test_more.py" not in names
    assert names["src/pkg/util.py"] == b"mine\n"


def test_a_patch_that_does_not_apply_says_where(tmp_path, origin):
    with pytest.raises(trees.TreeError, match=r"`patch` does not apply: .*core\.py") as refused:
        Bench(tmp_path, origin, patch=BUG.replace("return 2", "return 7"))
    assert refused.value.code == "patch"
    assert not os.listdir(tmp_path / "task")


def test_a_patch_that_is_none(tmp_path, origin):
    with pytest.raises(trees.TreeError, match="does not apply"):
        Bench(tmp_path, origin, patch="this is no patch\n")


def test_missing_test_files_are_named(tmp_path, origin):
    with pytest.raises(trees.TreeError, match=r"tests/test_gone\.py") as refused:
        Bench(tmp_path, origin, test_files=["tests/test_gone.py"])
    assert refused.value.code == "tests"


@pytest.mark.parametrize("of", ["buggy", "without tests"])
def test_rows_whose_commit_is_the_buggy_tree(tmp_path, origin, of):
    mirror = tmp_path / "mirror"
    git(tmp_path, "clone", "-q", str(origin), str(mirror))
    git(mirror, "apply", "-", data=BUG.encode())
    git(mirror, "commit", "-q", "src/pkg/core.py", "-m", "Bug Patch")
    if of == "without tests":
        git(mirror, "rm", "-q", "tests/test_core.py")
        git(mirror, "commit", "-q", "-m", "Remove F2P Tests")
    bench = Bench(tmp_path, mirror, base_is="buggy")
    assert contents(bench.checkout()) == WITHOUT_HIDDEN
    assert bench.rescore(bench.fix) == FILES


def test_rows_whose_patch_is_the_fix(tmp_path, origin):
    mirror = tmp_path / "mirror"
    git(tmp_path, "clone", "-q", str(origin), str(mirror))
    git(mirror, "apply", "-", data=BUG.encode())
    git(mirror, "commit", "-q", "src/pkg/core.py", "-m", "buggy")
    fix = git(mirror, "diff", "HEAD", "HEAD^")
    bench = Bench(tmp_path, mirror, base_is="buggy", patch_is="fix", patch=fix)
    assert contents(bench.checkout()) == WITHOUT_HIDDEN
    assert bench.rescore(bench.fix) == FILES


@pytest.mark.parametrize("of", ["the head", "the tip", "an older commit", "nothing"])
def test_a_repository_from_a_url(tmp_path, origin, of):
    mirror = tmp_path / "mirror"
    git(tmp_path, "clone", "-q", str(origin), str(mirror))
    tip = git(mirror, "rev-parse", "HEAD").strip()
    (mirror / "more.txt").write_text("x")
    git(mirror, "add", "more.txt")
    git(mirror, "commit", "-q", "-m", "more")
    newest = git(mirror, "rev-parse", "HEAD").strip()
    commit = {"the head": None, "the tip": newest, "an older commit": tip, "nothing": "0" * 40}[of]
    arguments = {
        "repo": str(tmp_path / "repo.git"),
        "url": f"file://{mirror}",
        "commit": commit,
        "read": ["more.txt", "src", "x"],
    }
    if of == "nothing":
        with pytest.raises(trees.TreeError) as refused:
            trees.make_repository(arguments, NOTHING)
        assert refused.value.code == "repository"
        return
    trees.make_repository(arguments, NOTHING)
    found = trees.BareRepository(arguments["repo"]).git("rev-parse", trees.BASE).decode().strip()
    assert found == (tip if of == "an older commit" else newest)


def test_a_url_where_nothing_is(tmp_path):
    with pytest.raises(trees.TreeError, match="nowhere"):
        trees.make_repository(
            {"repo": str(tmp_path / "r.git"), "url": "file:///nowhere", "commit": None, "read": []}, NOTHING
        )


def test_the_agents_patch_of_another_dataset_does_not_apply(bench):
    with pytest.raises(trees.TreeError, match="the patch does not apply"):
        bench.rescore(BUG)


def test_the_program_as_it_is_sent(bench):
    import sys

    from hermes_swe_smith.workspace import _LOADER, _sources

    programs = bench.tmp / "programs"
    (programs / "hermes_swe_smith").mkdir(parents=True)
    for name, text in _sources().items():
        (programs / "hermes_swe_smith" / f"{name}.py").write_text(text)
    argv = [sys.executable, "-I", "-S", "-c", _LOADER, str(programs), "give_tests"]
    arguments = bench.arguments()
    os.rmdir(arguments["work"])
    data = json.dumps(arguments).encode() + b"\n" + bench.fix.encode()
    done = subprocess.run(argv, input=data, capture_output=True, check=True, env={"PATH": os.environ["PATH"]})
    assert contents(bench.unpack(json.loads(done.stdout), "tested")) == FILES


def test_the_archive_leaves_nothing_behind_when_it_fails(bench):
    with pytest.raises(subprocess.CalledProcessError):
        trees.BareRepository(bench.repo).archive("0" * 40, bench.task)
    assert sorted(os.listdir(bench.task)) == ["agent", "fix.patch", "trees.json"]


# --- any work at all ------------------------------------------------------------------------------------------------

EXAMPLES = int(os.environ.get("HERMES_FUZZ_EXAMPLES", "15"))
"""How many cases each property is tried on; a long run takes thousands."""

fuzz = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, database=None
)

ODD = [b"\x1f\x8b\x08\x04x", b"BZh9", b"\xfd7zXZ", b"11 path=x\n", b"././@LongLink", b"\xff", b" ", b"-", b":(glob)*"]
ODD += [
    b".gitattributes",
    b".gitmodules",
    b"git~1",
    ".g\u200cit".encode(),
    b"\xef\xbb\xbf",
    b"a\\b",
    b"a\tb",
    b'"',
    b"\r",
]
ODD += [b"n" * 200, b"src", b"pkg", b"core.py", b"tests", b"conftest.py", b"a.log", b"build", b"__pycache__", b"..."]


def _can_be_a_name(name):
    return name not in (b".", b"..", b".gitignore") and name.lower() != b".git"


names = st.one_of(
    st.sampled_from(ODD),
    st.binary(min_size=1, max_size=12).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"0")),
).filter(_can_be_a_name)
paths = st.lists(names, min_size=1, max_size=4).map(b"/".join)
ignores = st.lists(st.sampled_from(["*.log", "!*.log", "build/", "!*", "/src/*", "a", "\\#", "[", "**/x", " ", "*\\"]))
kinds = st.one_of(
    st.binary(max_size=300).map(lambda content: ("file", content)),
    st.sampled_from([b"x\r\n", b"\xef\xbb\xbfx", b"\0", b"caf\xe9\n"]).map(lambda content: ("program", content)),
    paths.map(lambda target: ("link", target)),
    st.just(("directory", b"")),
    st.just(("gone", b"")),
    st.just(("hard link", b"")),
)
changes = st.lists(st.tuples(paths, kinds), max_size=12)


def change(root, path, kind, content):
    """One change of a checkout; those that can't be made are none."""
    place = os.path.join(os.fsencode(root), path)
    within = os.path.realpath(os.path.dirname(place)) + b"/"
    if not within.startswith(os.path.realpath(os.fsencode(root)) + b"/"):
        return  # through a link of its own, to what the bench keeps for all examples
    try:
        if kind == "gone":
            subprocess.run([b"rm", b"-rf", b"--", place], check=True)
            return
        if kind == "link" and not trees._is_text(content):
            return  # what no patch can tell
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if kind == "directory":
            os.mkdir(place)
        elif kind == "link":
            os.symlink(content, place)
        elif kind == "hard link":
            os.link(os.path.join(os.fsencode(root), b"src/pkg/crlf.txt"), place)
        else:
            with open(place, "wb") as file:
                file.write(content)
            os.chmod(place, 0o755 if kind == "program" else 0o644)
    except OSError:
        return


@pytest.fixture(scope="module")
def fuzz_bench(tmp_path_factory, origin):
    made = Bench(tmp_path_factory.mktemp("fuzz"), origin)
    made.start = made.checkout().rename(made.tmp / "start")
    return made


@fuzz
@given(changes, ignores)
@example([(b".GitModules/x", ("link", b"x")), (b"a/.gitmodules", ("link", b"x"))], [])
def test_any_work_is_taken_as_git_takes_it(fuzz_bench, made, ignored):
    """Beside a real git in a real checkout: the same tree, which comes back from the patch and from the archive."""
    bench = fuzz_bench
    with tempfile.TemporaryDirectory(dir=bench.tmp) as scratch:
        root = Path(scratch, "checkout")
        shutil.copytree(bench.start, root, symlinks=True)
        real = ["git", "-c", "core.protectNTFS=false", "-c", "core.protectHFS=false", "-c", "core.quotePath=false"]
        real += ["--git-dir", scratch + "/git", "--work-tree", str(root)]

        def do(*words):
            return subprocess.run([*real, *words], env=ENV, capture_output=True, check=True, cwd=root).stdout

        do("init", "-q", "--template=")
        os.makedirs(scratch + "/git/info", exist_ok=True)
        Path(scratch, "git/info/attributes").write_text(trees.ATTRIBUTES)
        Path(scratch, "git/info/exclude").write_text(trees.LEFT_BEHIND)
        do("add", "-A", "-f")
        if ignored:
            (root / ".gitignore").write_text("\n".join(ignored))
        for path, (kind, content) in made:
            change(root, path, kind, content)
        _, answer = bench.take_tar(packed(root))
        try:
            do("add", "-A")
        except subprocess.CalledProcessError as error:  # links of that name, or below it, which are left out
            assert b".gitmodules" in error.stderr.lower()
            bench.rescore(answer["patch"])
            return
        expected = do("write-tree").decode().strip()
        again = trees.BareRepository(bench.repo, tempfile.mkdtemp(dir=scratch))
        agent = Path(bench.task, "agent").read_text().splitlines()[1]
        try:
            assert again.apply(agent, answer["patch"], "the patch") == expected
        except trees.TreeError as refused:
            # Of an empty file below a directory that begins with a space, git can't read its own patch.
            assert "lacks filename information" in str(refused)
            return
        bench.rescore(answer["patch"])


def mangled(draw, data):
    """Bytes with some of them changed, left out, doubled, or put elsewhere."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), at + draw(st.sampled_from([1, 8, 12, 100, 512, 1024])))
        match draw(st.sampled_from(["change", "cut", "double", "digits", "end"])):
            case "change":
                data[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
            case "cut":
                del data[at:end]
            case "double":
                data[at:at] = data[at:end]
            case "digits":
                data[at : at + 12] = draw(
                    st.sampled_from([b"77777777777\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, bytes(12)])
                )
            case "end":
                del data[end:]
    return bytes(data)


def checksummed(data):
    """The checksums of a tar's headers set right, so that more than those is met."""
    data = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@contextlib.contextmanager
def no_hang(seconds=20):
    def over(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


OURS = (trees.TreeError, tarfile.TarError, ValueError, KeyError, EOFError, OSError, subprocess.CalledProcessError)


@fuzz
@given(st.data(), st.booleans())
def test_no_archive_makes_another_tree_or_takes_for_ever(fuzz_bench, data, right):
    bench = fuzz_bench
    tar = mangled(data.draw, packed(bench.start))
    with no_hang():
        try:
            tested, answer = bench.take_tar(checksummed(tar) if right else tar, max_workspace=1 << 20)
        except OURS:
            return
    # Whatever it was read as is a patch that gives the same tree, with the tests as they were.
    assert bench.rescore(answer["patch"]) == tested
    assert all(tested[name] == FILES[name] for name in FILES if name.startswith("tests/"))


@pytest.mark.parametrize("name", ["", ".", "./"])
def test_a_file_can_not_be_the_top_of_the_tree(fuzz_bench, name):
    with io.BytesIO() as data:
        with tarfile.open(fileobj=data, mode="w") as tar:
            tar.addfile(tarfile.TarInfo(name))
        with pytest.raises(ValueError, match="the top of the tree as a file"):
            fuzz_bench.take_tar(data.getvalue())


@fuzz
@given(st.data())
def test_no_patch_reaches_beyond_its_tree(fuzz_bench, data):
    bench = fuzz_bench
    patch = mangled(data.draw, bench.fix.encode()).decode("utf-8", "surrogateescape")
    before = everything(bench.tmp)
    with no_hang():
        try:
            tested = bench.rescore(patch)
        except OURS:
            tested = FILES
    assert all(tested[name] == FILES[name] for name in FILES if name.startswith("tests/"))
    new = [path for path in set(everything(bench.tmp)) - set(before) if "/again" not in path]
    assert all(Path(path).parts[len(bench.tmp.parts)].startswith("tmp") for path in new), new


def test_what_a_test_patch_adds_belongs_to_the_tests_and_not_to_the_bug(tmp_path, origin):
    added = "diff --git a/tests/data/new.csv b/tests/data/new.csv\nnew file mode 100644\n--- /dev/null\n"
    bench = Bench(tmp_path, origin, test_patch=added + "+++ b/tests/data/new.csv\n@@ -0,0 +1 @@\n+3,4\n")
    assert "tests/data/new.csv" not in contents(bench.checkout())
    tested, _ = bench.take(tmp_path / "slot")
    assert tested["tests/data/new.csv"] == b"3,4\n"
    assert b"3 * x" in tested["src/pkg/core.py"]


def test_what_a_test_patch_changes_is_tested_wherever_it_lies(tmp_path, origin):
    project = tmp_path / "project"
    git(tmp_path, "clone", "-q", str(origin), str(project))
    write(project, {"samples/new.csv": b"3,4\n", "tests/test_core.py": FILES["tests/test_core.py"] + b"# newer\n"})
    os.unlink(project / "tests/test_other.py")
    git(project, "add", "-A", "samples", "tests")
    test_patch = git(project, "diff", "--cached")
    start = {"base_is": "buggy", "patch": FIX, "patch_is": "fix", "test_patch": test_patch, "has_test_patch": True}
    git(project, "reset", "-q", "--hard")
    write(project, {"src/pkg/core.py": FILES["src/pkg/core.py"].replace(b"2 * x", b"3 * x")})
    git(project, "commit", "-q", "-m", "buggy", "src/pkg/core.py")
    bench = Bench(tmp_path, project, test_files=["tests/test_core.py"], hidden=[], **start)
    root = bench.checkout()
    assert contents(root)["tests/test_core.py"] == FILES["tests/test_core.py"]
    assert "samples/new.csv" not in contents(root)
    tested, answer = bench.take(root)
    assert tested["tests/test_core.py"].endswith(b"# newer\n")
    assert tested["samples/new.csv"] == b"3,4\n"
    assert "tests/test_other.py" not in tested
    assert answer["restored"] == answer["removed"] == []
    write(root, {"samples/new.csv": b"mine", "tests/test_other.py": b"mine", "tests/test_core.py": b"mine"})
    again, answer = bench.take(root)
    assert again == tested
    assert answer["restored"] == ["samples/new.csv", "tests/test_core.py", "tests/test_other.py"]


def test_a_checkout_gives_one_commit_and_the_modules_that_were_built_there(tmp_path, origin):
    checkout = tmp_path / "testbed"
    git(tmp_path, "clone", "-q", str(origin), str(checkout))
    commit = git(checkout, "rev-parse", "HEAD").strip()
    write(checkout, {"src/pkg/later.py": b"the fix"})
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "later")
    later = git(checkout, "rev-parse", "HEAD").strip()
    built = {"src/pkg/fast.so": b"\x7fELF", "src/pkg/_version.py": b"1", "src/pkg.egg-info/PKG-INFO": b"Name: pkg"}
    write(checkout, built)
    write(checkout, {"notes.txt": b"1", ".venv/lib/x.py": b"1", "build/pkg/x.py": b"1", "src/pkg/x.pyc": b"1"})
    os.symlink("/etc/passwd", checkout / "src/pkg/linked.py")
    git(checkout, "config", "core.fsmonitor", "touch ran; false")
    repo = trees.BareRepository(str(tmp_path / "repo.git"))
    trees.make_repository({"repo": repo.path, "checkout": str(checkout), "commit": commit, "read": []}, NOTHING)
    shutil.rmtree(checkout)
    assert set(repo.read(trees.BASE)) == {*FILES, *built}
    assert repo.contents({repo.read(trees.BASE)["src/pkg/fast.so"][1]}).popitem()[1] == b"\x7fELF"
    assert repo.git("fsck", "--no-dangling", trees.BASE) == b""
    for gone in (commit, later):
        with pytest.raises(subprocess.CalledProcessError):
            repo.git("cat-file", "-e", gone)
    with pytest.raises(trees.TreeError, match="no repository in"):
        arguments = {"repo": str(tmp_path / "other.git"), "checkout": str(checkout), "commit": None, "read": []}
        trees.make_repository(arguments, NOTHING)


def test_a_source_with_doctests_is_the_agents_and_their_examples_are_the_clean_trees(tmp_path, origin):
    project = tmp_path / "project"
    git(tmp_path, "clone", "-q", str(origin), str(project))
    source = b'def double(x):\n    """>>> double(1)\n    2\n    """\n    return 2 * x\n'
    write(project, {"src/pkg/core.py": source})
    write(project, {"src/pkg/other.py": b"def made(): pass\nmade.__doc__ = '>>> 1'\n"})
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "doctests")
    write(project, {"src/pkg/core.py": source.replace(b"2 * x", b"3 * x")})
    patch = git(project, "diff")
    doctests = {"src/pkg/core.py": ["pkg.core.double"], "src/pkg/other.py": ["pkg.other.made"]}
    bench = Bench(tmp_path, project, patch=patch, doctests=doctests, hidden=["src/pkg/core.py"])
    root = bench.checkout()
    assert b"3 * x" in (root / "src/pkg/core.py").read_bytes()
    write(root, {"src/pkg/core.py": b"mine\n", "src/pkg/other.py": b"mine\n"})
    tested, answer = bench.take(root)
    assert tested["src/pkg/core.py"] == b"mine\n"
    assert answer["doctests"] == {"src/pkg/core.py::pkg.core.double": [">>> double(1)\n    2\n    ", 1]}
    assert answer["restored"] == ["src/pkg/other.py"]  # its docstring can't be read from the source
