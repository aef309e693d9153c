"""Wrong options, names, values and files: refused in one line, before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ORACLE = ["rollout", "tasks", "TASKS", "--agent", "oracle"]
MODEL = ["rollout", "tasks", "TASKS", "--model", "m", "--base-url", "http://127.0.0.1:9/v1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # what does not exist, with the nearest name
        (["rolout"], ["unknown command 'rolout'", "did you mean 'rollout'?"]),
        (["rollout", "tsks"], ["unknown environment 'tsks'", "did you mean 'tasks'?"]),
        (["validate", "taks"], ["unknown environment 'taks'", "did you mean 'tasks'?"]),
        ([*ORACLE, "--backend", "locl"], ["unknown backend 'locl'", "did you mean 'local'?"]),
        (["doctor", "locale"], ["unknown backend 'locale'", "did you mean 'local'?"]),
        (["rollout", "tasks", "TASKS", "--agent", "orcle"], ["unknown agent 'orcle'", "did you mean 'oracle'?"]),
        (["rollout", "tasks", "TASKS", "--agent", ""], ["unknown agent ''", "known: model, nop, oracle"]),
        ([*ORACLE, "--isolation", "usr"], ["unknown isolation level 'usr'", "did you mean 'user'?"]),
        ([*ORACLE, "--env.max_item=1"], ["unknown key 'max_item' of environment 'tasks'", "did you mean 'max_items'?"]),
        ([*ORACLE, "--backend.tmpfs=1"], ["unknown key 'tmpfs' of profile 'default'", "did you mean 'tmpfs_size'?"]),
        ([*ORACLE, "--agent.max_turn=1"], ["unknown key 'max_turn' of agent 'oracle'", "did you mean 'max_turns'?"]),
        ([*ORACLE, "--evn.seed=1"], ["unknown section of options 'evn'", "did you mean 'env'?"]),
        ([*ORACLE, "--env.enabled_toolsets=termnal"], ["unknown toolset 'termnal'", "did you mean 'terminal'?"]),
        ([*ORACLE, "--env.disabled_toolsets=fil"], ["unknown toolset 'fil'", "did you mean 'file'?"]),
        ([*ORACLE, "--env.distribution=balancd"], ["unknown distribution 'balancd'", "did you mean 'balanced'?"]),
        ([*ORACLE, "--jsn"], ["no such option '--jsn'", "--json"]),
        ([*ORACLE, "--tone", "kind"], ["no such option '--tone'", "--env.tone or --backend.tone or --agent.tone"]),
        # values
        ([*ORACLE, "--concurrency", "0"], ["concurrency must be at least 1, not 0"]),
        ([*ORACLE, "--concurrency", "-3"], ["concurrency must be at least 1, not -3"]),
        ([*ORACLE, "--concurrency", "two"], ["'two' is not a valid integer", "rollout --help"]),
        ([*ORACLE, "--concurrency", "1000000"], ["concurrency must be at most 65536"]),
        ([*ORACLE, "--group-size", "0"], ["group_size must be at least 1, not 0"]),
        ([*ORACLE, "--group-size", "1000000000"], ["group_size must be at most 65536, not 1000000000"]),
        ([*ORACLE, "--items", "0"], ["--items", "0 is less than 1"]),
        ([*ORACLE, "--items", "-1"], ["--items", "-1 is less than 1"]),
        ([*ORACLE, "--max-turns", "0"], ["max_turns must be at least 1, not 0"]),
        ([*MODEL, "--max-turns", "-1"], ["max_turns must be at least 1, not -1"]),
        ([*MODEL, "--temperature", "-1"], ["temperature must be at least 0, not -1.0"]),
        ([*MODEL, "--temperature", "nan"], ["temperature must be a finite number"]),
        ([*MODEL, "--agent.max_tokens=0"], ["max_tokens must be at least 1"]),
        ([*MODEL, "--agent.extra_body=x"], ["extra_body must be a mapping, not 'x'", "JSON"]),
        ([*ORACLE, "--rollout-timeout", "0"], ["rollout_timeout must be more than 0"]),
        ([*ORACLE, "--rollout-timeout", "-1"], ["rollout_timeout must be more than 0"]),
        ([*ORACLE, "--rollout-timeout", "inf"], ["rollout_timeout must be a finite number"]),
        ([*ORACLE, "--stop-on-infra", "2"], ["stop_on_infra must be at most 1"]),
        ([*ORACLE, "--stop-on-infra", "-0.1"], ["stop_on_infra must be at least 0"]),
        ([*ORACLE, "--seed", "x"], ["--seed", "'x' is not a valid integer"]),
        ([*ORACLE, "--env.max_items=-1"], ["max_items must be at least 0, not '-1'"]),
        ([*ORACLE, "--env.shuffle=perhaps"], ["shuffle must be true or false, not 'perhaps'"]),
        ([*ORACLE, "--env.dataset_name"], ["'dataset_name' has no value", ".dataset_name=VALUE"]),
        ([*ORACLE, "--env.=1"], ["has no key", "--env.KEY=VALUE"]),
        ([*ORACLE, "--env.distribution=balanced", "--env.enabled_toolsets=file"], ["exclude each other"]),
        ([*ORACLE, "--backend.slots_per_sandbox=0"], ["slots_per_sandbox must be at least 1, not '0'"]),
        ([*ORACLE, "--backend.orphan_ttl_s=inf"], ["orphan_ttl_s must be a finite number"]),
        ([*ORACLE, "--backend.network=closed"], ["network must be 'none', 'open', 'setup' or 'allow', not 'closed'"]),
        ([*ORACLE, "--backend.env_vars=x"], ["env_vars must be a mapping", "JSON"]),
        ([*ORACLE, '--backend.env_vars={"A=B": "1"}'], ["env_vars holds 'A'"]),
        ([*ORACLE, '--backend.env_vars={"A": "\\u0000"}'], ["env_vars holds 'A'", "NUL"]),
        (
            [*ORACLE, "--backend.slots_per_sandbox=1", "--backend.max_sandboxes=1"],
            ["no slot for agents", "reserve_slots"],
        ),
        ([*ORACLE, "--backend.min_sandboxes=7", "--backend.max_sandboxes=2"], ["min_sandboxes 7 is above"]),
        # what is missing
        (["rollout"], ["missing argument 'ENV'"]),
        (["new"], ["missing argument 'KIND'. Choose from: environment, tool,"]),
        (["rollout", "tasks", "--agent", "oracle"], ["dataset_name is missing"]),
        (["rollout", "tasks", "TASKS"], ["no model is named", "--model"]),
        (["rollout", "tasks", "TASKS", "--model", "m"], ["no API key", "OPENAI_API_KEY", "--base-url"]),
        (
            ["rollout", "tasks", "TASKS", "--model", "m", "--base-url", "here"],
            ["'here' is not the URL", "http://HOST:PORT"],
        ),
        (["rollout", "tasks", "TASKS", "--model", "m", "--base-url", ""], ["'' is not the URL of a server"]),
        # what can't be had
        ([*ORACLE, "--isolation", "dedicated"], ["can't grant isolation 'dedicated'", "it grants: shared"]),
        ([*ORACLE, "--isolation", "shared"], ["accepts no isolation below 'user'", "--allow-unisolated"]),
        # the other two commands
        (["validate", "tasks", "TASKS", "--repeat", "0"], ["--repeat", "0 is less than 1"]),
        (["validate", "tasks", "TASKS", "--concurrency", "0"], ["concurrency must be at least 1"]),
        (["validate", "tasks", "TASKS", "--backend", "locl"], ["unknown backend 'locl'"]),
        (
            ["validate", "tasks", "TASKS", "--agent.model=m"],
            ["unknown section of options 'agent'", "known: backend, env"],
        ),
        (["validate", "tasks", "TASKS", "--agent", "nop"], ["no such option '--agent'"]),
        (["rescore", "nowhere"], ["'nowhere' does not exist"]),
        (["rescore", "."], ["no usable run.json"]),
        (["plugins", "x"], ["unexpected extra argument (x)"]),
    ],
    ids=lambda value: " ".join(value[-2:])[:50],
)
def test_it_is_refused_in_one_line(hermes, tasks, tmp_path, arguments, words):
    option = tasks()
    out = ["--out", "a/out"] if arguments[0] == "rollout" and len(arguments) > 2 else []
    hermes(*[option if argument == "TASKS" else argument for argument in arguments], *out).is_refused(*words)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", ["run.yaml, line 1, column 6: not valid YAML"]),
        ("a: b: c", ["run.yaml, line 1, column 5: not valid YAML"]),
        ("a: \x01", ["run.yaml is not valid YAML"]),
        (b"a: \xff\xfe", ["run.yaml is not valid YAML"]),
        ("- a", ["run.yaml does not hold a mapping", "`key: value`"]),
        ("just words", ["run.yaml does not hold a mapping"]),
        ("envs: {}", ["unknown section 'envs' of run.yaml", "did you mean 'env'?"]),
        ("env: 3", ["section 'env' of run.yaml is not a mapping"]),
        ("run: {concurency: 2}", ["unknown key 'concurency' of the run", "did you mean 'concurrency'?"]),
        ("run: {agent: oracle}", ["unknown key 'agent' of the run", "a section of its own"]),
        ("run: {resume: true}", ["unknown key 'resume' of the run", "command line"]),
        ("run: {environment: tasks}", ["unknown key 'environment' of the run", "command line"]),
        ("run: {out_dir: out}", ["unknown key 'out_dir' of the run", "command line"]),
        ("run: {progress: 1}", ["unknown key 'progress' of the run", "did you mean 'profile'"]),
        ("run: {concurrency: two}", ["concurrency must be a whole number, not 'two'"]),
        ("run: {concurrency: [2]}", ["concurrency must be a whole number"]),
        ("run: {backend_config: 1}", ["backend_config must be a mapping, not 1"]),
        ("env: {max_items: x}", ["max_items must be a whole number, not 'x'"]),
        ("env: {enabled_toolsets: 3}", ["enabled_toolsets must be a list, not 3"]),
        ("env: {system_prompt: [1]}", ["system_prompt must be a text"]),
        ("agent: {temperature: hot}", ["temperature must be a number, not 'hot'"]),
        ("agent: {name: orcale}", ["unknown agent 'orcale'", "did you mean 'oracle'?"]),
        ("backend: locall", ["unknown backend 'locall'", "did you mean 'local'?"]),
        ("backend: {name: local, slots: 3}", ["unknown key 'slots' of profile 'default'"]),
    ],
    ids=str,
)
def test_a_wrong_configuration_file_is_refused(hermes, tasks, tmp_path, text, words):
    (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    agent = [] if "agent:" in str(text) else ["--agent", "oracle"]
    hermes("rollout", "tasks", tasks(), *agent, "--config", "run.yaml", "--out", "a/out").is_refused(*words)
    assert not (tmp_path / "a").exists()


def test_a_configuration_file_that_is_not_there_is_refused(hermes, tasks):
    hermes("rollout", "tasks", tasks(), "--config", "no.yaml").is_refused("--config", "'no.yaml' does not exist")


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("HERMES_CONFIG", None, ["file.yaml, named by HERMES_CONFIG, can't be read", "check the path"]),
        ("HERMES_CONFIG", "modle: x", ["unknown key 'modle' of the settings", "did you mean 'model'?"]),
        ("HERMES_CONFIG", "secrets: 3", ["secrets must be a mapping, not 3"]),
        ("HERMES_ENV_FILE", None, ["HERMES_ENV_FILE names file.yaml, which is not a file"]),
        ("HERMES_PROFILES_FILE", None, ["file.yaml, named by profiles_file (HERMES_PROFILES_FILE), can't be read"]),
        ("HERMES_PROFILES_FILE", "profile: {}", ["unknown key 'profile' of file.yaml", "did you mean 'profiles'?"]),
        ("HERMES_PROFILES_FILE", "profiles: 3", ["profiles must be a mapping, not 3"]),
        ("HERMES_PROFILES_FILE", "profiles: {default: {cpus: 1}}", ["unknown key 'cpus' of profile 'default'"]),
        (
            "HERMES_PROFILES_FILE",
            "profiles: {other: {memory: much}}",
            ["profile 'other'", "memory must be a whole number"],
        ),
        (
            "HERMES_PROFILES_FILE",
            "default_profile: smal\nprofiles: {small: {}}",
            ["unknown profile 'smal' in default_profile", "did you mean 'small'?"],
        ),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(hermes, tasks, tmp_path, variable, text, words):
    if text is not None:
        (tmp_path / "file.yaml").write_text(text)
    hermes("rollout", "tasks", tasks(), "--agent", "oracle", **{variable: "file.yaml"}).is_refused(*words)


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [["tsks"], ["--concurrency", "x"], ["--nope"], ["tasks", "--env.max_items=x"]])
def test_the_installed_program_says_the_same_without_a_traceback(tmp_path: Path, arguments):
    environment = {**os.environ, "HERMES_ENV_FILE": "", "HERMES_PLUGINS": ""}
    program = Path(sys.executable).parent / "hermes-rl"
    command = [str(program)] if program.exists() else [sys.executable, "-m", "hermes_core"]
    done = subprocess.run(
        [*command, "rollout", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
