"""The command line: what is written, the file, the environment's variables; every form of value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hermes_testing.scripted_server import ScriptedServer


@pytest.fixture
def config_of(atropos_extra: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`config_of("--env.x=1", …)`: the environment that the command would run, without running it."""
    from hermes_atropos import commands, env
    from hermes_atropos.metrics import Metrics

    made: list[Any] = []

    class Recorded(env.HermesAgentBaseEnv):  # type: ignore[misc, name-defined]
        name = "recorded"
        setup = get_next_item = format_prompt = compute_reward = evaluate = None

        def __init__(self, config: Any, servers: Any, **_: Any) -> None:
            made.append((config, servers))
            self.config, self.metrics, self.evaluation = config, Metrics("train"), Metrics("eval")

        async def process_manager(self) -> None:
            pass

        env_manager = evaluate_manager = process_manager

    def run(*arguments: str, mode: str = "process") -> Any:
        group = commands.make_group(lambda runtime, name: Recorded, takes_name=False)
        done = CliRunner().invoke(group, [mode, *arguments], obj=0)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            return done.output
        return made[-1]

    return run


def test_values_of_every_form(config_of: Callable[..., Any]) -> None:
    config, (server,) = config_of(
        *("--env.steps_per_eval", "-1", "--env.total_steps=7", "--env.inference_weight", "-0.5"),
        *("--env.enabled_toolsets", "terminal,file", "--env.disabled_toolsets=[]"),
        *("--env.extra_body", '{"a": {"b": [1]}}', "--env.use_wandb"),
        *("--env.modal_image", "python:3.12", "--env.modal_secrets=a,b", "--env.docker_memory=512"),
        *("--openai.base_url=http://127.0.0.1:1/v1", "--openai.timeout", "5"),
    )
    assert (config.steps_per_eval, config.total_steps, config.inference_weight) == (-1, 7, -0.5)
    assert (config.enabled_toolsets, config.disabled_toolsets) == (["terminal", "file"], [])
    assert config.extra_body == {"a": {"b": [1]}}
    assert config.use_wandb is True
    assert config.sandbox == {"modal": {"image": "python:3.12", "secrets": "a,b"}, "docker": {"memory": "512"}}
    assert (server.base_url, server.timeout) == ("http://127.0.0.1:1/v1", 5)


def test_names_of_nomads_sandboxes(config_of: Callable[..., Any]) -> None:
    written = [
        "tool_pool_mode=nomad",
        "nomad_address=http://n:4646",
        "sandbox_job_id=mine",
        "sandbox_image=python:3.12",
    ]
    written += ["slots_per_container=5", "min_containers=0", "max_containers=3", "driver=podman"]
    config, _ = config_of(*(f"--env.{each}" for each in written))
    assert config.backend == "nomad"
    assert config.sandbox["nomad"] == {
        "address": "http://n:4646",
        "job_prefix": "mine",
        "image": "python:3.12",
        "slots_per_sandbox": "5",
        "min_sandboxes": "0",
        "max_sandboxes": "3",
        "driver": "podman",
    }
    assert "sandbox_image" in config_of("--env.sandbox_image=python:3.12"), "they mean nothing to other backends"


def test_a_setting_of_another_name_goes_where_it_is_declared(config_of: Callable[..., Any]) -> None:
    written = ["max_agent_turns=3", "max_turn_tokens=9", "endpoint_patience=0", "compact_at=0.5", "tool_pool_size=2"]
    written += ["terminal_timeout=7", "local_idle_timeout=8", "seed=5", "system_prompt=Hm.", "deadline=60"]
    config, _ = config_of(*(f"--env.{each}" for each in written))
    agent, options = config.agent_settings(), config.run_options(groups=9)
    assert (agent.max_turns, agent.max_tokens, agent.endpoint_patience_s, agent.compact_at) == (3, 9, 0, 0.5)
    assert (agent.temperature, agent.tool_call_parser, agent.check_patience_s) == (1, None, 1)
    assert options.backend_config == {"execution_timeout_s": 7, "idle_timeout": "8"}
    assert (options.concurrency, options.seed, options.deadline_s, options.backend) == (2, 5, 60, "local")
    assert config.environment_settings() == {"seed": 5, "system_prompt": "Hm."}


def test_a_setting_is_bound_as_where_it_is_declared(config_of: Callable[..., Any]) -> None:
    for wrong in ("max_agent_turns=0", "agent_temperature=-1", "tool_pool_size=65537", "terminal_timeout=0"):
        assert f"{wrong.partition('=')[0]} must be" in config_of(f"--env.{wrong}")


def test_what_is_written_comes_before_the_file(config_of: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "env:\n  group_size: 3\n  total_steps: 9\n  local_max_sandboxes: 2\n"
        "openai:\n  - {base_url: 'http://a/v1', server_type: vllm}\n  - {base_url: 'http://b/v1', server_type: vllm}\n"
    )
    config, servers = config_of("--config", str(path), "--env.group_size=4")
    assert (config.group_size, config.total_steps, config.sandbox) == (4, 9, {"local": {"max_sandboxes": 2}})
    assert [server.base_url for server in servers] == ["http://a/v1", "http://b/v1"]
    assert "write the settings in the file" in str(config_of("--config", str(path), "--openai.timeout=3"))


@pytest.mark.parametrize("section", ["env: [1]", "openai: [1]", "openai: x"])
def test_a_section_of_another_form_is_refused(config_of: Callable[..., Any], tmp_path: Path, section: str) -> None:
    (tmp_path / "run.yaml").write_text(section)
    assert "is not a mapping" in config_of("--config", str(tmp_path / "run.yaml"))


def test_the_defaults_of_each_mode(config_of: Callable[..., Any]) -> None:
    config, _ = config_of()
    assert config.use_wandb is False
    assert (config.ensure_scores_are_not_same, config.include_messages) == (False, True)
    assert config.data_path_to_save_groups == "data/recorded.jsonl"
    config, _ = config_of(mode="serve")
    assert (config.ensure_scores_are_not_same, config.data_path_to_save_groups) == (True, None)
    config, _ = config_of(mode="evaluate")
    assert config.data_dir_to_save_evals == "data/recorded-eval"


def test_variables_name_the_server(config_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BASE_URL": "http://x/v1", "MODEL": "m", "API_KEY": "k", "TYPE": "sglang"}.items():
        monkeypatch.setenv(f"ATROPOS_SERVER_{name}", value)
    monkeypatch.setenv("ATROPOS_TOKENIZER_NAME", "tok")
    config, (server,) = config_of()
    assert config.tokenizer_name == "tok"
    assert (server.base_url, server.model_name, server.api_key) == ("http://x/v1", "m", "k")
    assert (server.server_type, server.health_check) == ("sglang", False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env.grup_size=2"], "did you mean 'group_size'"),
        (["--openai.base_ur=x"], "did you mean 'base_url'"),
        (["--opena.base_url=x"], "did you mean 'openai'"),
        (["--env.group_size=many"], "group_size must be a whole number"),
        (["--env.extra_body={"], "extra_body"),
        (["--env.group_size"], "has no value"),
    ],
)
def test_mistakes_are_named(config_of: Callable[..., Any], arguments: list[str], said: str) -> None:
    assert said in config_of(*arguments)


@pytest.mark.usefixtures("atropos_extra")
async def test_the_command_runs_from_a_dotenv_file(
    obedient_server: ScriptedServer, tasks: str, tokenizer_folder: str, tmp_path: Path
) -> None:
    import asyncio

    (tmp_path / ".env").write_text(
        f"ATROPOS_SERVER_BASE_URL={obedient_server.base_url}\nATROPOS_SERVER_MODEL=scripted\n"
        f"ATROPOS_SERVER_API_KEY=none\nATROPOS_TOKENIZER_NAME={tokenizer_folder}\n"
    )
    command = [sys.executable, "-m", "hermes_core", "atropos", "process", "tasks", "--env.total_steps", "2"]
    command += ["--env.dataset_name", tasks, "--env.group_size", "1", "--env.max_items", "2"]
    command += [] if os.geteuid() == 0 else ["--env.isolation", "shared", "--env.allow_unisolated"]
    environment = {key: value for key, value in os.environ.items() if key != "HERMES_ENV_FILE"}
    run = asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    done = await run
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["groups"], told["rollouts"]) == (2, 2)
    assert len((tmp_path / told["written"]).read_text().splitlines()) == 2
