"""Plugins are found by entry point, each by itself; broken, clashing and left-out ones are reported by name."""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import PluginError, UnknownNameError, UsageError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.plugins.manager import PluginManager
from hermes_core.plugins.registry import BROUGHT_BY, PluginInfo, PluginStatus

Install = Callable[..., None]

pytestmark = pytest.mark.entry_points


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install("hermes-rl-x", "x = x_module", x_module="…source…")`: a distribution as pip would leave it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(distribution: str, *entry_points: str, version: str = "1.0", **modules: str) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("\n".join(["[hermes_core]", *entry_points]) + "\n")
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
            monkeypatch.delitem(sys.modules, name, raising=False)

    return add


def registering(kind: str, name: str, target: str = "os:getcwd", more: str = "") -> str:
    """The source of a plugin that claims one name."""
    return f"""
from hermes_core.plugins.hookspecs import hookimpl
{more}
@hookimpl
def hermes_register_{kind}s(registry):
    registry.add({name!r}, {target!r}, summary="made by a test", requires=("nothing",))
"""


def only(manager: PluginManager, *names: str) -> dict[str, PluginInfo]:
    return {plugin.name: plugin for plugin in manager.plugins if plugin.name in names}


def test_a_name_that_one_plugin_claims_twice_is_its_error(install: Install) -> None:
    again = 'registry.add("beta", "os:getpid", aliases="alpha")'
    install("hermes-rl-alpha", "alpha = t_alpha", t_alpha=f"{registering('backend', 'alpha')}    {again}\n")
    manager = PluginManager()
    plugin = only(manager, "alpha")["alpha"]
    assert plugin.status is PluginStatus.FAILED
    assert "backend 'alpha' is registered twice: as 'made by a test' and as 'os:getpid'" in plugin.reason
    assert "alpha" not in manager.registry("backend").names()


def test_a_plugin_is_found_and_its_names_carry_its_distribution(install: Install) -> None:
    install("hermes-rl-alpha", "alpha = t_alpha", t_alpha=registering("backend", "alpha"))
    manager = PluginManager()
    entry = manager.registry("backend").entry("alpha")
    assert (entry.plugin.distribution, entry.plugin.version, entry.requires) == ("hermes-rl-alpha", "1.0", ("nothing",))
    assert entry.plugin.hooks == ("hermes_register_backends",)
    assert entry.load() is __import__("os").getcwd


def test_a_broken_plugin_is_reported_and_takes_no_other_down(install: Install) -> None:
    install("hermes-rl-aaa", "aaa = t_aaa", t_aaa="import no_such_module_here")
    install("hermes-rl-bbb", "bbb = t_bbb", t_bbb="raise SystemExit('at import')")
    install("hermes-rl-ccc", "ccc = t_ccc", t_ccc=registering("environment", "ccc"))
    manager = PluginManager()
    found = only(manager, "aaa", "bbb", "ccc")
    assert [found[name].status.value for name in ("aaa", "bbb", "ccc")] == ["failed", "failed", "loaded"]
    assert "no_such_module_here" in found["aaa"].reason
    assert "hermes-rl-aaa" in found["aaa"].hint
    assert "SystemExit: at import" in found["bbb"].reason
    assert "ccc" in manager.registry("environment").names()
    assert any("plugin 'aaa' (hermes-rl-aaa 1.0) failed to load: ModuleNotFoundError" in p for p in manager.problems())
    assert any("`hermes-rl -vv plugins` shows where" in problem for problem in manager.problems())


def test_another_unknown_name_mentions_the_nearest_and_what_did_not_load(install: Install) -> None:
    install("hermes-rl-broken", "broken = t_broken", t_broken="1/0")
    with pytest.raises(
        UnknownNameError, match=r"did you mean 'tasks'.*not loaded: .*plugin 'broken' \(hermes-rl-broken"
    ):
        PluginManager().registry("environment").entry("task")


def test_the_allow_list_leaves_others_out_but_never_the_builtins(install: Install) -> None:
    install("hermes-rl-one", "one = t_one", t_one=registering("backend", "one"))
    install("hermes-rl-two", "two = t_two", t_two="raise AssertionError('must not be imported')")
    manager = PluginManager(allow=("one", "three"))
    found = only(manager, "one", "two", "three")
    assert found["one"].status is PluginStatus.LOADED
    assert found["two"].status is PluginStatus.EXCLUDED
    assert found["three"].status is PluginStatus.MISSING
    assert "named in HERMES_PLUGINS but not installed" in found["three"].reason
    with pytest.raises(UsageError, match="plugin 'three' is named in HERMES_PLUGINS but not installed"):
        manager.check_named()
    assert set(manager.registry("backend").names()) == {"local", "one"}
    with pytest.raises(UnknownNameError, match=r"plugin 'two' \(hermes-rl-two 1.0\) is installed but left out"):
        manager.registry("backend").entry("two")
    assert not any("'two'" in problem for problem in manager.problems())


@pytest.mark.parametrize(("api", "advice"), [(2, "--upgrade hermes-rl"), (0, "--upgrade hermes-rl-other")])
def test_another_plugin_api_names_the_upgrade(install: Install, api: int, advice: str) -> None:
    source = registering("backend", "other", more=f"HERMES_PLUGIN_API = {api}")
    install("hermes-rl-other", "other = t_other", t_other=source)
    manager = PluginManager()
    [plugin] = only(manager, "other").values()
    assert plugin.status is PluginStatus.FAILED
    assert f"made for plugin API {api}, and hermes-rl 0." in plugin.reason
    assert plugin.hint.endswith(advice)


def test_two_plugins_claiming_one_name_are_both_named_and_nothing_else_suffers(install: Install) -> None:
    both = registering("environment", "same")
    install("hermes-rl-one", "one = t_one", t_one=both + "    registry.add('mine', 'os:getcwd')\n")
    install("hermes-rl-two", "two = t_two", t_two=both)
    manager = PluginManager()
    registry = manager.registry("environment")
    with pytest.raises(PluginError) as caught:
        registry.entry("same")
    assert "plugin 'one' (hermes-rl-one 1.0) and plugin 'two' (hermes-rl-two 1.0)" in str(caught.value)
    assert {"mine", "tasks"} <= set(registry.names())
    assert "same" not in registry.names()
    assert any("'same' is claimed by" in problem for problem in manager.problems())


def test_an_alias_clashes_like_a_name_and_leaves_the_name_usable(install: Install) -> None:
    install("hermes-rl-one", "one = t_one", t_one=registering("backend", "one"))
    aliasing = """
from hermes_core.plugins.hookspecs import hookimpl
@hookimpl
def hermes_register_backends(registry):
    registry.add("two", "os:getcwd", aliases=("one", "zwei"))
"""
    install("hermes-rl-two", "two = t_two", t_two=aliasing)
    registry = PluginManager().registry("backend")
    assert registry.entry("zwei").name == registry.entry("two").name == "two"
    with pytest.raises(PluginError, match="claimed by"):
        registry.entry("one")


def test_two_distributions_with_one_entry_point_name_are_both_refused(install: Install) -> None:
    install("hermes-rl-one", "same = t_one", t_one=registering("backend", "one"))
    install("hermes-rl-two", "same = t_two", t_two=registering("backend", "two"))
    install("hermes-rl-core", "core = t_three", t_three=registering("backend", "three"))
    manager = PluginManager()
    reasons = {plugin.distribution: plugin.reason for plugin in manager.plugins if plugin.name in ("same", "core")}
    assert "hermes-rl-two" in reasons["hermes-rl-one"]
    assert "hermes-rl-one" in reasons["hermes-rl-two"]
    assert "plugin 'core' (hermes-rl " in reasons["hermes-rl-core"]
    assert not {"one", "two", "three"} & {*manager.registry("backend").names()}


def test_entry_points_are_loaded_in_the_order_of_their_names(install: Install) -> None:
    for name in ("zeta", "beta", "eta"):
        install(f"hermes-rl-{name}", f"{name} = t_{name}", **{f"t_{name}": registering("backend", name)})
    names = [plugin.name for plugin in PluginManager(allow=("zeta", "beta", "eta")).plugins if not plugin.builtin]
    assert [name for name in names if name in ("zeta", "beta", "eta")] == ["beta", "eta", "zeta"]


def test_a_plugin_whose_registration_fails_provides_nothing_at_all(install: Install) -> None:
    source = registering("backend", "half") + "    registry.add('', 'os:getcwd')\n"
    install("hermes-rl-half", "half = t_half", t_half=source)
    manager = PluginManager()
    assert only(manager, "half")["half"].status is PluginStatus.FAILED
    assert "half" not in manager.registry("backend").names()
    assert not any("half" in label for label, _ in manager.registered)


def plugin(**functions: Any) -> types.ModuleType:
    """A plugin module with these hook implementations."""
    module = types.ModuleType("handed_over")
    vars(module).update(functions)
    return module


def load(*plugins: object) -> PluginManager:
    return PluginManager(extra=plugins, load_entry_points=False)


def test_objects_can_be_plugins_too() -> None:
    class Mine:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def hermes_register_agents(self, registry: Any) -> None:
            registry.add(self.name, dict)

    manager = load(Mine("first"), Mine("second"))
    assert {"first", "second"} <= set(manager.registry("agent").names())
    assert "given to the runtime" in manager.registry("agent").entry("first").plugin.label


async def _async_observer(trajectory_id: str) -> None: ...


async def _async_wrapper() -> Any:
    yield


def _plain_wrapper(item: Any) -> None: ...


def _old_wrapper(item: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"hermes_register_backend": hookimpl(lambda registry: None)}, "did you mean 'hermes_register_backends'"),
        ({"hermes_register_tools": hookimpl(lambda registre: None)}, "did you mean 'registry'"),
        ({"hermes_register_tools": hookimpl(wrapper=True)(lambda registry: None)}, "can't be wrapped"),
        ({"hermes_trajectory_started": hookimpl(_async_observer)}, "not async"),
        ({"setup_trajectory_workspace": hookimpl(lambda item: {})}, "is implemented by the environment"),
        ({"setup_trajectory_workspace": hookimpl(wrapper=True)(_plain_wrapper)}, "not a plain generator"),
        ({"setup_trajectory_workspace": hookimpl(wrapper=True)(_async_wrapper)}, "not a plain generator"),
        ({"solve_trajectory": hookimpl(hookwrapper=True)(_old_wrapper)}, "old-style"),
        ({"hermes_register_agents": hookimpl(lambda registry: registry.add("a", "not a place"))}, "is not a factory"),
        ({"hermes_register_agents": hookimpl(lambda registry: registry.add("a b", dict))}, "cannot be the name"),
        ({"hermes_register_agents": hookimpl(lambda registry: 1 / 0)}, "ZeroDivisionError"),
        ({}, "implements no hook"),
    ],
)
def test_a_hook_that_could_not_work_is_refused(functions: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load(plugin(**functions))


def test_a_backend_that_nobody_provides_names_the_package_to_install() -> None:
    with pytest.raises(UnknownNameError, match=r"hermes-rl-modal is not installed \(pip install hermes-rl-modal\)"):
        load().registry("backend").entry("modal")
    with pytest.raises(UnknownNameError, match=r"\(did you mean 'docker'\? pip install hermes-rl-docker\)"):
        load().registry("backend").entry("dockr")
    with pytest.raises(UnknownNameError, match="did you mean 'local'") as caught:
        load().registry("backend").entry("locla")
    assert "pip" not in str(caught.value)


def test_a_name_that_a_distribution_of_ours_brings_names_the_package_to_install() -> None:
    with pytest.raises(UnknownNameError, match="unknown agent 'codex': hermes-rl-agents is not installed"):
        load().registry("agent").entry("codex")
    ours = [claim for claim in PluginManager().claims if claim.plugin.distribution.startswith("hermes-rl-")]
    named = [
        (claim.plugin.distribution, claim.kind, name)
        for claim in ours
        if claim.kind in ("agent", "backend", "command", "environment")
        for name in (claim.name, *claim.aliases)
    ]
    assert named
    for distribution, kind, name in named:
        assert BROUGHT_BY[kind].get(name.replace("_", "-")) == distribution, f"{kind} {name}"


def test_one_word_needs_no_brackets() -> None:
    @hookimpl
    def register(registry: Any) -> None:
        registry.add("paper", "os:getcwd", aliases="sheet", requires="docker")

    entry = load(plugin(hermes_register_backends=register)).registry("backend").entry("sheet")
    assert (entry.name, entry.aliases, entry.requires) == ("paper", ("sheet",), ("docker",))
