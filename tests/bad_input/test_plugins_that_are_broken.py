"""Plugins that do not load, clash, or fail when they are used: named, with a reason, and without a traceback."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install("name", source)`: a distribution as pip would leave it, which HERMES_PLUGINS names."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    names: list[str] = []

    def add(name: str, source: str) -> None:
        info = folder / f"hermes_rl_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hermes-rl-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hermes_core]\n{name} = bad_{name}\n")
        module = "from hermes_core.plugins.hookspecs import hookimpl\n" + textwrap.dedent(source)
        (folder / f"bad_{name}.py").write_text(module)
        monkeypatch.delitem(sys.modules, f"bad_{name}", raising=False)
        names.append(name)
        monkeypatch.setenv("HERMES_PLUGINS", ",".join(names))

    return add


ENVIRONMENT = """
    from hermes_core.environment import Environment

    class Mine(Environment):
        name = "mine"
        def items(self): return [{"id": "a"}]
        def format_prompt(self, item): return "p"
        @hookimpl
        def verify_and_score_trajectory(self, item): return 1.0
        @hookimpl
        def solve_trajectory(self, item): pass
        CHANGE

    @hookimpl
    def hermes_register_environments(registry):
        registry.add("mine", "bad_mine:Mine")
"""
ORACLE = ["rollout", "mine", "--agent", "oracle"]


def test_the_plugin_works_when_nothing_is_wrong_with_it(hermes, install, level):
    install("mine", ENVIRONMENT.replace("CHANGE", ""))
    done = hermes(*ORACLE, *level)
    assert (done.code, "1 solved" in done.out) == (0, True), (done.out, done.err)


BROKEN = {
    "at import": ("import no_such_module", ["unknown environment 'mine'", "No module named 'no_such_module'"]),
    "by its syntax": ("def f(:", ["unknown environment 'mine'", "SyntaxError"]),
    "by leaving": ("raise SystemExit('bye')", ["unknown environment 'mine'", "SystemExit: bye"]),
    "in its registration": (
        "@hookimpl\ndef hermes_register_environments(registry): 1 / 0",
        ["unknown environment 'mine'", "ZeroDivisionError"],
    ),
    "by a hook that is none": ("@hookimpl\ndef hermes_register_envs(registry): pass", ["implements no hook"]),
    "by having no hook": ("x = 1", ["it implements no hook", "@hookimpl"]),
    "by another API": ("HERMES_PLUGIN_API = 99", ["made for plugin API 99", "pip install --upgrade hermes-rl"]),
}


@pytest.mark.parametrize(("source", "words"), BROKEN.values(), ids=BROKEN)
def test_asking_for_what_a_broken_plugin_has_says_why(hermes, install, source, words):
    install("mine", source)
    hermes(*ORACLE, "--out", "out").is_refused("plugin 'mine' (hermes-rl-mine 1.0) failed to load", *words)
    assert not Path("out").exists()


def test_a_broken_plugin_is_told_and_takes_nothing_else_down(hermes, install, tasks, level):
    install("mine", "import no_such_module")
    done = hermes("rollout", "tasks", tasks(), "--agent", "oracle", *level)
    assert done.code == 0
    [problem] = [line for line in done.err.splitlines() if line.startswith("problem: ")]
    assert "plugin 'mine' (hermes-rl-mine 1.0) failed to load: ModuleNotFoundError" in problem
    done.has_no_noise()


def test_a_plugin_that_is_named_and_not_installed_is_refused(hermes, install, tasks, monkeypatch):
    install("mine", ENVIRONMENT.replace("CHANGE", ""))
    monkeypatch.setenv("HERMES_PLUGINS", "mien")
    words = ["plugin 'mien' is named in HERMES_PLUGINS but not installed", "did you mean 'mine'?"]
    hermes("rollout", "tasks", tasks(), "--agent", "oracle").is_refused(*words)
    listed = hermes("plugins")
    assert listed.code == 0
    assert re.search(r"^mien +missing$", listed.out, re.M)
    assert f"problem: {words[0]}" in listed.err


def test_a_plugin_that_is_left_out_is_named(hermes, install, monkeypatch):
    install("mine", ENVIRONMENT.replace("CHANGE", ""))
    monkeypatch.setenv("HERMES_PLUGINS", "")
    words = ["plugin 'mine' (hermes-rl-mine 1.0) is installed but left out", "add 'mine' to HERMES_PLUGINS"]
    hermes(*ORACLE).is_refused("unknown environment 'mine'", *words)


def test_two_plugins_with_one_name_are_both_named(hermes, install):
    install("mine", ENVIRONMENT.replace("CHANGE", ""))
    install("other", "@hookimpl\ndef hermes_register_environments(registry): registry.add('mine', 'os:getcwd')")
    done = hermes(*ORACLE)
    assert (done.code, done.sandboxes) == (1, 0)
    done.says("environment 'mine' is claimed by", "hermes-rl-mine 1.0", "hermes-rl-other 1.0", "uninstall one")


FAILING = {
    "an import on first use": ("import no_such_sdk", ["No module named 'no_such_sdk'", "hermes-rl-late"]),
    "no class": ("Late = 3", ["is 3, which is not an Environment class"]),
}


@pytest.mark.parametrize(("source", "words"), FAILING.values(), ids=FAILING)
def test_what_fails_when_it_is_first_used_names_the_plugin(hermes, install, tmp_path, source, words):
    install("late", "@hookimpl\ndef hermes_register_environments(registry): registry.add('late', 'late_part:Late')")
    (tmp_path / "site" / "late_part.py").write_text(source)
    done = hermes("rollout", "late", "--agent", "oracle", "--out", "out")
    assert (done.code, done.sandboxes) == (1, 0)
    done.says("environment 'late' of plugin 'late' (hermes-rl-late 1.0)", *words)
    assert not (tmp_path / "out").exists()


METHODS = {
    "when it is made": ("def __init__(self, config): 1 / 0", ["cannot be made: ZeroDivisionError"]),
    "in setup": ("async def setup(self): 1 / 0", ["'mine' failed in setup(): ZeroDivisionError", "--traceback"]),
    "in items": ("def items(self): return 1 / 0", ["'mine' failed in items() or item_id(): ZeroDivisionError"]),
    "with items that are none": ("def items(self): return [1]", ["'mine' failed in items() or item_id()"]),
    "with items without id": ("def items(self): return [{}]", ["has no id", "override item_id()"]),
    "with a setting that is none": ("config_class = dict", ["as config_class", "EnvironmentConfig"]),
    "with a hook that wants too much": (
        "@hookimpl\n        def setup_trajectory_workspace(self, itme): pass",
        ["has no argument 'itme'", "did you mean 'item'?"],
    ),
}


@pytest.mark.parametrize(("change", "words"), METHODS.values(), ids=METHODS)
def test_an_environment_that_fails_before_the_run_is_named(hermes, install, tmp_path, change, words):
    install("mine", ENVIRONMENT.replace("CHANGE", change))
    done = hermes(*ORACLE, "--out", "out")
    assert (done.code in (1, 2), done.out, done.sandboxes) == (True, "", 0), done.err
    done.says(*words)
    assert not (tmp_path / "out").exists()


HOOKS = {
    "the prompt": ("def format_prompt(self, item): 1 / 0", "setup: ZeroDivisionError"),
    "the prompt, async": (
        'async def format_prompt(self, item): return "p"',
        "setup: format_prompt of environment 'mine' is async, and is called without await (write `def format_prompt",
    ),
    "the set-up": ("@hookimpl\n        def setup_trajectory_workspace(self, item): 1 / 0", "setup: ZeroDivisionError"),
    "the solution": (
        "@hookimpl\n        def solve_trajectory(self, item): 1 / 0",
        "setup (at agent): the reference solution can't be applied: ZeroDivisionError",
    ),
    "the verification": (
        "@hookimpl\n        def verify_and_score_trajectory(self, item): 1 / 0",
        "verifier: ZeroDivisionError",
    ),
    "the reward": (
        "@hookimpl\n        def verify_and_score_trajectory(self, item): return 'good'",
        "verifier: verify_and_score_trajectory of 'mine' gave 'good' (return a finite reward",
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(("change", "said"), HOOKS.values(), ids=HOOKS)
def test_a_hook_that_fails_is_in_the_record_and_the_summary(hermes, install, records, level, change, said):
    install("mine", ENVIRONMENT.replace("CHANGE", change))
    done = hermes(*ORACLE, "--out", "out", *level)
    assert done.code == 3
    assert f"  {said}" in done.out
    done.has_no_noise()
    [record] = records()
    assert record["reward"] is None


@pytest.mark.parametrize("own", ["mine", "another"])
def test_patches_are_verified_again_by_the_name_that_the_environment_is_registered_by(hermes, install, level, own):
    methods = """async def setup_trajectory_workspace(self, rollout): rollout.record_patch("x")
        async def score_patch(self, item, patch, rollout): return 1.0, {}"""
    install("mine", ENVIRONMENT.replace("CHANGE", methods).replace('name = "mine"', f'name = "{own}"'))
    assert hermes(*ORACLE, "--out", "out", *level).code == 0
    done = hermes("rescore", "out", "--trust-run", *level)
    assert (done.code, done.out) == (0, "1 of 1 patches got the same reward again\n"), done.err


def test_a_backend_that_can_not_be_made_is_named(hermes, install, tasks):
    install("cloud", "@hookimpl\ndef hermes_register_backends(registry): registry.add('cloud', 'no_such_sdk:Backend')")
    done = hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--backend", "cloud", "--out", "out")
    assert (done.code, done.sandboxes) == (1, 0)
    done.says(
        "backend 'cloud' of plugin 'cloud' (hermes-rl-cloud 1.0) cannot be loaded", "No module named 'no_such_sdk'"
    )
    assert not Path("out").exists()


def test_a_function_that_was_not_made_a_tool_says_how(hermes, install):
    install(
        "mine",
        """
        def search(query: str) -> str: return query

        @hookimpl
        def hermes_register_tools(registry):
            registry.add(search)
        """,
    )
    told = hermes("plugins").err
    assert "is no tool (make one: function_tool(function)" in told
    assert "Traceback" not in told


def test_a_sink_that_lacks_a_method_is_named(hermes, install, level):
    install("mine", ENVIRONMENT.replace("CHANGE", ""))
    install(
        "half",
        """
        class Half:
            def __init__(self, target): pass

        @hookimpl
        def hermes_register_sinks(registry):
            registry.add("half", Half)
        """,
    )
    done = hermes(*ORACLE, *level, "--sink", "half=x")
    assert done.code != 0 and "which is no Sink" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("async def run(self, task): return task.result", "which is no Agent"),
        (
            """
            async def run(self, task): return task.result
            async def aclose(self): pass
            async def check_endpoint(self): {}['url']
            """,
            "agent 'half' failed in check_endpoint(): KeyError: 'url'",
        ),
    ],
)
def test_an_agent_that_is_broken_is_named(hermes, install, level, body, told):
    install("mine", ENVIRONMENT.replace("CHANGE", ""))
    source = """
        class Half:
            name = "half"
            def __init__(self, settings): pass
            BODY

        @hookimpl
        def hermes_register_agents(registry):
            registry.add("half", Half)
        """
    install("half", textwrap.dedent(source).replace("    BODY", textwrap.indent(textwrap.dedent(body).strip(), "    ")))
    done = hermes("rollout", "mine", "--agent", "half", *level)
    assert done.code == 1 and told in done.err and "Traceback" not in done.err
