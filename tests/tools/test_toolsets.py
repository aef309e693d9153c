"""Toolsets, distributions, and what a configuration resolves to."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.errors import ConfigError, PluginError, UnknownNameError
from hermes_core.plugins import builtin
from hermes_core.tools.base import Tool, ToolParams
from hermes_core.tools.registry import ToolRegistry, expand_toolset, resolve_tools
from hermes_core.tools.toolsets import Distribution

CORE = ["terminal", "process", "read_file", "write_file", "patch", "search_files"]


async def nothing(ctx: Any, params: Any) -> str:
    return ""


@pytest.fixture
def registry() -> ToolRegistry:
    tools = ToolRegistry()
    builtin.hermes_register_tools(tools)  # type: ignore[arg-type]
    tools.add(Tool("web_search", ToolParams, nothing, "Search.", where="driver", toolsets=("web",)))
    return tools


@pytest.mark.parametrize(
    ("toolset", "tools"),
    [
        ("terminal", ["terminal", "process"]),
        ("file", ["read_file", "write_file", "patch", "search_files"]),
        ("debugging", CORE),
        ("safe", ["read_file", "search_files"]),
        ("web", ["web_search"]),
        ("all", [*CORE, "web_search"]),
        ("*", [*CORE, "web_search"]),
    ],
)
def test_a_toolset_is_expanded_to_its_tools(registry: ToolRegistry, toolset: str, tools: list[str]) -> None:
    assert expand_toolset(registry, toolset) == tools
    assert resolve_tools(registry, [toolset]) == tools


def test_nothing_in_safe_runs_commands_or_writes(registry: ToolRegistry) -> None:
    assert not {"terminal", "process", "write_file", "patch"} & set(expand_toolset(registry, "safe"))


def test_toolsets_compose(registry: ToolRegistry) -> None:
    registry.add_toolset("research", tools=["terminal"], includes=["web", "safe", "all"])
    assert set(expand_toolset(registry, "research")) == {*CORE, "web_search"}
    registry.add_toolset("web", tools=["terminal"], summary="Declared, and joined by a tool")
    assert expand_toolset(registry, "web") == ["terminal", "web_search"]


def test_a_diamond_is_no_circle_and_a_circle_is_named(registry: ToolRegistry) -> None:
    registry.add_toolset("a", includes=["b", "c"])
    registry.add_toolset("b", includes=["safe"])
    registry.add_toolset("c", includes=["safe"])
    assert expand_toolset(registry, "a") == ["read_file", "search_files"]
    registry.add_toolset("x", includes=["y"])
    registry.add_toolset("y", includes=["z"])
    registry.add_toolset("z", includes=["y"])
    with pytest.raises(ConfigError, match=r"y -> z -> y"):
        expand_toolset(registry, "x")


def test_unknown_names_bring_the_nearest(registry: ToolRegistry) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'terminal'"):
        resolve_tools(registry, ["termnal"])
    with pytest.raises(UnknownNameError, match="did you mean 'file'"):
        resolve_tools(registry, ["terminal"], ["fil"])
    with pytest.raises(UnknownNameError, match="did you mean 'balanced'"):
        resolve_tools(registry, distribution="balancd")
    registry.add_toolset("broken", tools=["terminl"])
    with pytest.raises(UnknownNameError, match=r"of toolset 'broken'.*did you mean 'terminal'"):
        resolve_tools(registry, ["broken"])
    registry.add_toolset("outer", includes=["webb"])
    with pytest.raises(UnknownNameError, match="included by 'outer'"):
        resolve_tools(registry, ["outer"])


def test_names_are_claimed_once_and_some_are_reserved(registry: ToolRegistry) -> None:
    with pytest.raises(PluginError, match="toolset 'safe'"):
        registry.add_toolset("safe")
    with pytest.raises(PluginError, match="distribution 'default'"):
        registry.add_distribution("default", {"file": 1})
    for name in ("all", "*"):
        with pytest.raises(ConfigError, match="reserved"):
            registry.add_toolset(name)
        with pytest.raises(ConfigError, match="reserved"):
            Tool("mine", ToolParams, nothing, "Does nothing.", "driver", (name,))


def test_without_any_choice_all_are_loaded_with_a_warning(
    registry: ToolRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_tools(registry) == [*CORE, "web_search"]
    assert "all 7 tools are loaded" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert resolve_tools(registry, None, ["web", "terminal"]) == CORE[2:]
        assert caplog.records
        caplog.clear()
        resolve_tools(registry, ["all"])
        resolve_tools(registry, distribution="default")
    assert not caplog.records


def test_an_empty_choice_is_no_tools(registry: ToolRegistry, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_tools(registry, []) == []
        assert resolve_tools(registry, [], ["web"]) == []
    assert not caplog.records
    with pytest.raises(ConfigError, match="toolsets \\(none\\) and the distribution"):
        resolve_tools(registry, [], distribution="default")


def test_what_is_disabled_is_left_out_whatever_contains_it(registry: ToolRegistry) -> None:
    assert resolve_tools(registry, ["debugging"], ["safe"]) == ["terminal", "process", "write_file", "patch"]
    assert resolve_tools(registry, ["safe"], ["all"]) == []
    assert resolve_tools(registry, None, ["file"], "terminal_only") == ["terminal", "process"]


def test_the_order_is_the_registry_s(registry: ToolRegistry) -> None:
    assert resolve_tools(registry, ["web", "file", "terminal"]) == [*CORE, "web_search"]


def test_toolsets_and_a_distribution_exclude_each_other(registry: ToolRegistry) -> None:
    with pytest.raises(ConfigError, match="not both"):
        resolve_tools(registry, ["file"], distribution="default")


# --- distributions ---------------------------------------------------------------------------------------------------


def test_the_built_in_distributions_are_there(registry: ToolRegistry) -> None:
    assert list(registry.distributions) == ["default", "development", "terminal_only", "terminal_tasks", "balanced"]
    for seed in range(50):
        for name in ("default", "terminal_only"):
            assert registry.distributions[name].sample(seed) == ["terminal", "file"]


def test_each_toolset_is_drawn_by_itself_as_often_as_it_says() -> None:
    draws = [Distribution("d", {"a": 80, "b": 30, "c": 50}).sample(seed) for seed in range(4000)]
    share = {name: sum(name in drawn for drawn in draws) / 4000 for name in "abc"}
    nothing_drawn = 0.2 * 0.7 * 0.5  # then the most probable is taken
    assert abs(share["a"] - (0.8 + nothing_drawn)) < 0.03
    assert abs(share["b"] - 0.3) < 0.03 and abs(share["c"] - 0.5) < 0.03
    both = sum({"b", "c"} <= set(drawn) for drawn in draws) / 4000
    assert abs(both - 0.15) < 0.03


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 100), min_size=1), st.integers() | st.text())
def test_a_draw_is_never_empty_and_always_the_same(percent: dict[str, float], seed: int | str) -> None:
    if not any(percent.values()):
        return
    drawn = Distribution("d", percent).sample(seed)
    assert drawn and set(drawn) <= set(percent)
    assert Distribution("d", dict(percent)).sample(seed) == drawn


def test_a_draw_depends_on_the_seed_only_and_not_on_the_process() -> None:
    distribution = Distribution("d", {"a": 50, "b": 50, "c": 50})
    here = [distribution.sample(seed) for seed in range(20)]
    code = (
        "from hermes_core.tools.toolsets import Distribution\n"
        "d = Distribution('d', {'a': 50, 'b': 50, 'c': 50})\n"
        "print([d.sample(seed) for seed in range(20)])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here) and len({tuple(each) for each in here}) > 3


def test_another_toolset_in_the_distribution_changes_nothing_for_the_others() -> None:
    for seed in range(100):
        small = set(Distribution("d", {"a": 50, "sure": 100}).sample(seed))
        large = set(Distribution("d", {"b": 50, "a": 50, "sure": 100}).sample(seed))
        assert large - {"b"} == small


@pytest.mark.parametrize("percent", [{}, {"a": 0}, {"a": -1}, {"a": 101}, {"a": float("nan")}])
def test_impossible_distributions_are_refused(percent: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Distribution("d", percent)


def test_a_resolved_distribution_is_a_pure_function_of_its_seed(registry: ToolRegistry) -> None:
    draws = {seed: resolve_tools(registry, distribution="balanced", seed=seed) for seed in range(50)}
    assert draws == {seed: resolve_tools(registry, distribution="balanced", seed=seed) for seed in range(50)}
    assert {tuple(tools) for tools in draws.values()} == {tuple(CORE), tuple(CORE[:2]), tuple(CORE[2:])}
