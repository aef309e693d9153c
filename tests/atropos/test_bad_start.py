"""Whatever is wrong with what was asked for is said at the start, with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedServer

from hermes_core.errors import ConfigError, DatasetError, ModelError, UsageError

NOWHERE = "http://127.0.0.1:9/v1"


def test_a_tokenizer_that_is_not_there(make_env: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer .*nothing.* can't be loaded"):
        make_env(NOWHERE, tokenizer_name=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="ATROPOS_TOKENIZER_NAME"):
        make_env(NOWHERE, tokenizer_name="")


def test_a_server_that_can_not_be_used(make_env: Any) -> None:
    with pytest.raises(ConfigError, match="gives no logprobs"):
        make_env(NOWHERE, "trl")
    with pytest.raises(ConfigError, match="extra_body is for servers of type openai"):
        make_env(NOWHERE, "vllm", extra_body={"top_p": 0.9})


async def test_a_server_that_gives_no_logprobs(make_env: Any, token_server: Any) -> None:
    token_server.logprobs = False
    env = make_env(token_server.base_url, "vllm")
    with pytest.raises(ModelError, match="/generate gave no token ids with logprobs as the API server of Atropos"):
        await env.process_manager()


async def test_an_openai_server_in_the_place_of_a_vllm_one(make_env: Any, obedient_server: ScriptedServer) -> None:
    with pytest.raises(ModelError, match="404"):
        await make_env(obedient_server.base_url, "vllm").process_manager()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_agent_turn": 3}, "max_agent_turn"),
        ({"enabled_toolsets": ["terminal"], "distribution": "balanced"}, "exclude each other"),
        ({"max_agent_turns": 0}, "greater than or equal to 1"),
    ],
)
def test_a_wrong_setting(make_env: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_env(NOWHERE, **settings)


async def test_groups_that_would_never_be_sent(make_env: Any) -> None:
    env = make_env(NOWHERE, "vllm", group_size=1, ensure_scores_are_not_same=True)
    said = (
        r"group_size=1 and ensure_scores_are_not_same .*set --env.ensure_scores_are_not_same=false, or --env.group_size"
    )
    with pytest.raises(ConfigError, match=said):
        await env.env_manager()


async def test_a_wrong_setting_of_the_plugin_or_the_backend(make_env: Any) -> None:
    with pytest.raises(DatasetError, match="can't read"):
        await make_env(NOWHERE, dataset_name="/nothing/there").process_manager()
    with pytest.raises(UsageError, match="did you mean 'slots_per_sandbox'"):
        await make_env(NOWHERE, local_slot_per_sandbox=3).process_manager()
    with pytest.raises(UsageError, match="max_sandboxes must be a whole number"):
        await make_env(NOWHERE, local_max_sandboxes="many").process_manager()


@pytest.mark.usefixtures("atropos_extra")
@pytest.mark.parametrize("package", ["atroposlib", "wandb"])
def test_a_package_of_the_extra_that_is_missing(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from hermes_core.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "atropos", "process", "tasks"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert f"the Atropos adapter needs {package}, which is not installed" in done.stderr
    assert "pip install hermes-rl-atropos" in done.stderr
    assert "Traceback" not in done.stderr
