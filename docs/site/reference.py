"""The generated pages of the reference: the command line, every setting, the hooks, the public API."""

import inspect
import json
from pathlib import Path

import click
from hermes_atropos.flat import FlatSettings
from hermes_daytona.config import DaytonaConfig
from hermes_e2b.config import E2bConfig
from hermes_kubernetes.config import KubernetesConfig
from hermes_nomad.config import NomadConfig

import hermes_core
from hermes_core.agents.base import AgentSettings
from hermes_core.cli.main import main
from hermes_core.cli.settings_table import settings_table
from hermes_core.datasets.tasks import TaskRow, TasksConfig
from hermes_core.environment import EnvironmentConfig
from hermes_core.runs.options import RunOptions
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.settings import VARIABLES, Settings

API = {
    "runs": (
        "Runs",
        "Run rollouts from Python, read what they recorded, and use sandboxes directly.",
        (
            *(
                "runtime",
                "settings",
                "runs.options",
                "runs.session",
                "runs.group",
                "runs.external_agent",
                "runs.trainer",
            ),
            *("records.tokens", "runs.runner", "soundness.validate", "soundness.verdicts", "soundness.rescore"),
            *("records.run_files", "records.store", "records.summary"),
            *("export.card", "export.exporting", "export.merge", "export.selection"),
            *("records.record", "sink", "tool_backend", "sandbox.commands", "terminal"),
        ),
    ),
    "environments": (
        "Environments",
        "What an author of an environment uses.",
        (
            *(
                "environment",
                "handles",
                "mcp",
                "cheats",
                "rollout.rollout",
                "rollout.leased_slot",
                "rollout.tool_context",
                "pytest_runner.run",
                "datasets.rows",
                "datasets.files",
                "datasets.intake",
                "rollout.starvation",
            ),
            "sandbox.pool.checkpoint",
            "sandbox.pool.preparation",
        ),
    ),
    "tools": ("Tools", "What an author of a tool uses.", ("tools",)),
    "agents": ("Agents and parsers", "What an author of an agent or of a tool-call parser uses.", ("agents",)),
    "backends": (
        "Backends",
        "What an author of a backend implements, ready-made channels, tasks and threads.",
        ("sandbox", "aio", "workers"),
    ),
    "plugins": (
        "Plugins",
        "How a plugin registers what it provides, and makes commands.",
        ("plugins", "validation", "version", "cli", "printing"),
    ),
    "errors": ("Errors", "Every error has a message and a `hint` that says what to do next.", ("errors",)),
}
"""The pages of the API: title, first sentence, and the modules of `hermes_core` whose public names are on it."""

OF_MODULES = {
    "agents": tuple(
        f"hermes_agents.program.{name}" for name in ("MCP_SERVER", "AgentProgram", "ProgramAgent", "ProgramSettings")
    ),
    "backends": ("hermes_core.sandbox.uids.reserve", "hermes_core.sandbox.uids.UidBlock"),
}
"""What is on a page besides: names that are imported from their modules."""


def pages():
    """Return the text of every generated page."""
    return {
        "reference/command-line.md": command_line(),
        "reference/settings.md": settings(),
        "reference/hooks.md": HOOKS,
        "reference/record-schema.md": record_schema(),
        **{f"reference/api/{page}.md": api(page) for page in API},
        "reference/api/testing.md": TESTING,
    }


# ---------------------------------------------------------------------- the public API


def api(page):
    """Return a page with the public names of some modules, each documented by mkdocstrings."""
    title, summary, _ = API[page]
    names = [name for name in hermes_core.__all__ if page_of(name) == page and not name.startswith("__")]
    intro = f"{summary} Import these names from `hermes_core`."
    entries = [f"::: {place_of(name)}.{name}" for name in sorted(names, key=str.lower)]
    if page in OF_MODULES:
        entries += ["Import these names from their modules.", *(f"::: {name}" for name in OF_MODULES[page])]
    return "\n\n".join([f"# {title}", intro, *entries]) + "\n"


def place_of(name):
    """Return the module that defines a public name."""
    return hermes_core._places()[name]


def page_of(name):
    """Return the page of a public name: that of the longest prefix of its module."""
    module = place_of(name).removeprefix("hermes_core.")
    fitting = [
        (len(prefix), page)
        for page, (_, _, prefixes) in API.items()
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    if not fitting:
        raise LookupError(f"{name} of {module} has no page: name its module in API of docs/site/reference.py")
    return max(fitting)[1]


TESTING = """# Models and scripts

What asks a model, for agents of your own, and a server that answers from a script, for tests. Import these names from
their modules.

::: hermes_core.agents.model.OpenAIServer

::: hermes_testing.scripted_server
    options:
      show_root_heading: true
      filters: ["!^_"]
"""

HOOKS = """# Hooks

A plugin implements hooks to register what it provides, to wrap what environments do, and to observe runs.

::: hermes_core.plugins.hookspecs
    options:
      show_root_heading: false
      show_root_toc_entry: false
      show_if_no_docstring: false
      filters: ["!^_", "!^PROJECT$"]
"""


def record_schema():
    """Return the page with the schema of a record."""
    text = json.dumps(hermes_core.record_schema(), indent=2)
    intro = "The JSON schema of a [record](records.md). In Python, `hermes_core.record_schema()` returns it."
    return f"# Record schema\n\n{intro}\n\n```json\n{text}\n```\n"


# ---------------------------------------------------------------------- the command line


def command_line():
    """Return the page of all commands and options."""
    context = click.Context(main, info_name="hermes-rl", max_content_width=100)
    parts = ["# Command line", "Options stand in any order. Defaults are in square brackets."]
    parts += command(main, context, 2)
    parts += ["## Commands of plugins", "`hermes-rl commands` lists those that are installed."]
    for entry in Runtime(settings=Settings()).commands.entries():
        added = entry.load()
        parts += command(added, click.Context(added, info_name=entry.name, parent=context), 3)
    return "\n\n".join(parts) + "\n"


def command(described, context, level):
    """Yield the parts that describe a command, and those of its subcommands."""
    yield f"{'#' * level} {context.command_path}"
    usage = " ".join(described.collect_usage_pieces(context))
    yield f"```text\n{context.command_path} {usage}\n```"
    if described.help:
        yield prose(described.help)
    options = [parameter for parameter in described.get_params(context) if isinstance(parameter, click.Option)]
    rows = [record for option in options if (record := option.get_help_record(context))]
    if rows:
        yield table(("option", "what it does"), [(f"`{option}`", meaning) for option, meaning in rows])
    if described.epilog:
        yield prose(described.epilog)
    if isinstance(described, click.Group):
        for name in described.list_commands(context):
            inner = described.get_command(context, name)
            yield from command(inner, click.Context(inner, info_name=name, parent=context), min(level + 1, 3))


# ---------------------------------------------------------------------- settings


def settings():
    """Return the page of every setting: its type, its default and its meaning."""
    runtime = Runtime(settings=Settings())
    parts = [SETTINGS]
    parts += ["## Runtime", model(Settings, variables={key: name for name, key in VARIABLES.items()})]
    parts += ["## Run", "Section `run` of the configuration file.", model(RunOptions)]
    parts += ["## Agent", "Section `agent`, and `--agent.KEY=VALUE`.", model(AgentSettings)]
    parts += [
        "## Environments",
        "Section `env`, and `--env.KEY=VALUE`. Every environment has:",
        model(EnvironmentConfig),
    ]
    parts += ["### Environment `tasks`", model(TasksConfig, beside=EnvironmentConfig)]
    for name in ("swe-smith", "harbor", "terminal-bench-2", "endless-terminals"):
        kind = runtime.environment_class(name).config_class
        parts += [f"### Environment `{name}`", model(kind, beside=EnvironmentConfig)]
    parts += ["### A row of `tasks`", "One line of the JSONL file.", model(TaskRow)]
    parts += ["## Backends", "Section `backend`, `--backend.KEY=VALUE`, and the keys of a profile. Every backend has:"]
    parts += [model(SandboxConfig)]
    for name in ("local", "docker", "singularity", "ssh", "slurm", "modal"):
        parts += [f"### Backend `{name}`", model(runtime.backend(name).config_class, beside=SandboxConfig)]
    # the packages of these backends have an environment of their own
    parts += ["### Backend `daytona`", model(DaytonaConfig, beside=SandboxConfig)]
    parts += ["### Backend `e2b`", model(E2bConfig, beside=SandboxConfig)]
    parts += ["### Backend `kubernetes`", model(KubernetesConfig, beside=SandboxConfig)]
    parts += ["### Backend `nomad`", model(NomadConfig, beside=SandboxConfig)]
    parts += [
        "## Atropos",
        "`--env.KEY=VALUE` of `hermes-rl atropos`, beside the settings of Atropos itself.",
        model(FlatSettings),
    ]
    return "\n\n".join(parts) + "\n"


SETTINGS = """# Settings

This page lists every setting. [Configuration](configuration.md) says where each is written and which place wins.
A dash in the column *default* means that the setting must be given."""


def model(kind, *, beside=None, variables=None):
    """Return a table of a pydantic model's fields.

    Args:
        beside: a base class whose fields are left out, unless their default or type differs.
        variables: the environment variables that set fields.
    """
    rows = []
    for row in settings_table(kind, "setting"):
        name, meaning = row["key"].partition(".")[0], row["summary"]
        field = kind.model_fields[name]
        inherited = beside.model_fields.get(name) if beside else None
        if inherited is not None and (inherited.default, inherited.annotation) == (field.default, field.annotation):
            continue
        if variables and name in variables:
            meaning += f" Variable `{variables[name]}`."
        default = row["default"].replace(str(Path.home()), "~")
        rows.append((f"`{row['key']}`", row["type"], f"`{default}`" if default else "–", meaning))
    return table(("setting", "type", "default", "meaning"), rows)


# ---------------------------------------------------------------------- Markdown


def table(heads, rows):
    """Return a Markdown table."""
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def prose(text):
    """Return a help text as Markdown."""
    return inspect.cleandoc(text).replace("<", "&lt;")
