"""What is missing or does not fit for token-exact rollouts is said before a request or a sandbox, with what to do."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hermes_core.agents.base import AgentTask
from hermes_core.agents.exact.factory import open_exact_agent
from hermes_core.agents.model import ModelAgent, ModelSettings
from hermes_core.cli.main import main
from hermes_core.errors import ConfigError, UnknownNameError, UsageError
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.validation import validate_data
from tests.support.token_server import TokenServer

NOWHERE = "http://127.0.0.1:9/v1"
WITHOUT_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "prompt": "p", "check": "true"}\n')
    return f"--env.dataset_name={path}"


@pytest.fixture
def refused(tasks: str) -> Callable[..., str]:
    """What `rollout` says, when it ends before anything is begun."""

    def call(*arguments: object) -> str:
        given = ["rollout", "tasks", tasks, "--base-url", NOWHERE, "--model", "m", *map(str, arguments)]
        done = CliRunner().invoke(main, given)
        assert (done.exit_code, done.stdout) == (2, ""), done.stderr
        return done.stderr

    return call


@pytest.mark.few(1)
@pytest.mark.parametrize("package", ["transformers", "jinja2", "aiohttp"])
def test_a_package_that_is_not_installed(package: str, tasks: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from hermes_core.cli.main import main; main()"
    given = ["rollout", "tasks", tasks, "--parser", "hermes", "--base-url", NOWHERE, "--model", "m"]
    done = subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert re.search(rf"token-exact rollouts need (\w+ and )*{package}\b", done.stderr), done.stderr
    assert "pip install 'hermes-rl[exact]'" in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokenizer_name": "x"}, "tokenizer_name: only for token-exact rollouts, so set tool_call_parser, too"),
        ({"chat_template": "x", "server_type": "vllm"}, "chat_template, server_type: only for token-exact rollouts"),
        ({"tool_call_parser": "auto", "extra_body": {"top_p": 0.5}}, "there is chat_template_kwargs"),
        ({"tool_call_parser": "auto", "models": {"a": {"extra_body": {"top_k": 1}}}}, "there is chat_template_kwargs"),
        ({"tool_call_parser": "auto", "temperature": None}, "the logprobs depend on it"),
        ({"tool_call_parser": "auto", "server_type": "openai"}, "server_type must be 'vllm' or 'sglang'"),
        ({"tool_call_parser": "auto", "max_token_length": 1}, "max_token_length must be at least 2"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate_data(ModelSettings, given, "the agent")


@pytest.mark.parametrize("choice", [{"model": "m"}, {"models": {"m": 1}}], ids=["one model", "several models"])
async def test_an_agent_of_the_runtime_gives_tokens_if_its_settings_name_a_parser(
    tokenizers: Callable[[str], Any], tmp_path: Path, choice: dict[str, Any]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say something."}\n')
    tokenizer = tokenizers("chatml")
    records: list[Mapping[str, Any]] = []
    async with (
        TokenServer(tokenizer, lambda prompt: "Something.") as server,
        Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime,
    ):
        given = {"tool_call_parser": "hermes", "base_url": server.base_url, "tokenizer_name": tokenizer.name_or_path}
        agent = runtime.agent("model", {**choice, **given, "server_type": "vllm", "max_token_length": 1000})
        env = {"dataset_name": str(prompts), "enabled_toolsets": ()}
        await run_rollouts(runtime, "prompts", agent, env=env, on_record=records.append)
    assert [len(record["sequences"]) for record in records] == [1]
    assert [record["failure"] for record in records] == [None]


async def test_a_token_exact_agent_that_nobody_opened_says_so() -> None:
    async with Runtime(Settings(), load_entry_points=False) as runtime:
        agent = runtime.agent("model", {"model": "m", "tool_call_parser": "hermes"})
        with pytest.raises(UsageError, match=r"not loaded yet \(pass it to run_rollouts"):
            await agent.run(AgentTask("t", [], [], no_tool, nothing_to_solve))


async def no_tool(name: str, arguments: Mapping[str, Any], task_id: str) -> str:
    raise AssertionError(name)


async def nothing_to_solve() -> None:
    raise AssertionError


def test_an_agent_that_gives_no_tokens_is_not_made_in_place_of_one_that_does() -> None:
    with pytest.raises(UsageError, match=r"gives no tokens.* \(make it with Runtime.agent"):
        ModelAgent(ModelSettings(model="m", tool_call_parser="hermes"))


@pytest.mark.usefixtures("exact_extra")
def test_a_parser_that_does_not_exist(refused: Callable[..., str]) -> None:
    assert "unknown parser 'hermess' (did you mean 'hermes'?)" in refused("--parser", "hermess")


@pytest.mark.usefixtures("exact_extra")
def test_a_tokenizer_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused("--parser", "auto", f"--agent.tokenizer_name={tmp_path / 'nothing'}")
    assert "can't be loaded" in said
    assert "give --agent.tokenizer_name: a folder with the model's tokenizer" in said


@pytest.mark.usefixtures("exact_extra")
def test_a_broken_tokenizer(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "can't be loaded" in refused("--parser", "auto", f"--agent.tokenizer_name={tmp_path}")


def test_a_parser_that_does_not_fit(refused: Callable[..., str], tokenizers: Callable[[str], Any]) -> None:
    said = refused("--parser", "mistral", f"--agent.tokenizer_name={tokenizers('chatml').name_or_path}")
    assert "'mistral' does not read the calls that the chat template of" in said
    assert "set tool_call_parser=hermes" in said


def test_a_chat_template_that_can_not_be_used(
    refused: Callable[..., str], tokenizers: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = f"--agent.tokenizer_name={tokenizers('chatml').name_or_path}"
    template = tmp_path / "plain.jinja"
    template.write_text(WITHOUT_TOOLS)
    assert "ignores `tools`" in refused("--parser", "auto", folder, f"--agent.chat_template={template}")
    assert "can't be read" in refused("--parser", "auto", folder, "--agent.chat_template=nowhere.jinja")
    unknown = refused("--parser", "auto", folder, '--agent.chat_template_kwargs={"enable_thinkin": false}')
    assert "unknown variable 'enable_thinkin' of the chat template" in unknown


async def test_without_tools_nothing_is_asked_of_the_template(tokenizers: Callable[[str], Any], tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tokenizers("chatml"))
    tokenizer.chat_template = f"{WITHOUT_TOOLS}<|im_start|>assistant\n"
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    parser = Runtime(Settings(), load_entry_points=False).parser("hermes")
    given = ModelSettings(
        tool_call_parser="hermes", base_url=NOWHERE, model="m", tokenizer_name=str(tmp_path / "tokenizer")
    )
    with pytest.raises(ConfigError, match="ignores `tools`"):
        await open_exact_agent(given, {"hermes": parser}, tools=True)
    agent = await open_exact_agent(given, {"hermes": parser}, tools=False)
    await agent.aclose()


def test_a_server_is_named(tasks: str, tokenizers: Callable[[str], Any]) -> None:
    given = ["--parser", "auto", "--model", "m", f"--agent.tokenizer_name={tokenizers('chatml').name_or_path}"]
    done = CliRunner().invoke(main, ["rollout", "tasks", tasks, *given])
    assert done.exit_code == 2
    assert "is not the URL of a vllm or sglang server (write http://HOST:PORT/v1)" in done.stderr


@pytest.mark.usefixtures("exact_extra")
def test_other_agents_have_no_parser(tasks: str) -> None:
    done = CliRunner().invoke(main, ["rollout", "tasks", tasks, "--agent", "oracle", "--parser", "hermes"])
    assert done.exit_code == 2
    assert "tool_call_parser" in done.stderr


def test_a_parser_is_looked_up_by_any_of_its_names() -> None:
    from hermes_core.runs.session import parsers_with

    runtime = Runtime(Settings(), load_entry_points=False)
    assert next(iter(parsers_with(runtime, "deepseek_v31"))) == "deepseek_v31"
    with pytest.raises(UnknownNameError):
        parsers_with(runtime, "nothing")
