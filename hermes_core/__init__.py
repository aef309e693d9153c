"""hermes-rl: tool-using agents in sandboxes, scored by what really happened there, recorded for RL trainers.

What a plugin or a script needs is imported from here. A module is loaded when the first of its names is used, so that
`import hermes_core` stays quick. Whatever is not listed in `__all__` is internal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hermes_core.version import PLUGIN_API, __version__

if TYPE_CHECKING:
    from hermes_core.agents.base import (
        Agent,
        AgentResult,
        AgentSettings,
        AgentTask,
        CallError,
        CallErrorKind,
        CallRecord,
        StopReason,
        ToolAnswer,
        TurnRecord,
    )
    from hermes_core.agents.calls import run_calls
    from hermes_core.agents.chat import Chat
    from hermes_core.agents.exact import ExactAgent
    from hermes_core.agents.failures import BadCompletion
    from hermes_core.agents.generate import Served, TokenServer
    from hermes_core.agents.opening import open_exact_agent
    from hermes_core.agents.parsers.base import ParsedCall, ParsedText, ParseProblem, Parser
    from hermes_core.agents.retries import Endpoint
    from hermes_core.aio import BrokenOff, LoopThread, SingleFlight, TaskSet, alongside, complete
    from hermes_core.cheats import Cheat, shell_cheat, shell_cheats, usual_cheats
    from hermes_core.cli.run_command import RunCommand, carry_out, chosen_agent
    from hermes_core.environment import Environment, EnvironmentConfig, FollowUp, Item, Need
    from hermes_core.envs.datasets import read_rows
    from hermes_core.envs.driven import DrivenRollout
    from hermes_core.envs.driven_run import DrivenRun
    from hermes_core.envs.group import Group, GroupRoller, Rolled
    from hermes_core.envs.leased_slot import Fresh, LeasedSlot
    from hermes_core.envs.options import RunOptions
    from hermes_core.envs.pytest_run import PytestReport, ReportStatus, run_pytest
    from hermes_core.envs.record import Record, record_schema
    from hermes_core.envs.rescore import rescore
    from hermes_core.envs.rollout import Rollout, RolloutContext
    from hermes_core.envs.rows import checked_row, load_rows, read_jsonl
    from hermes_core.envs.runner import run_rollouts
    from hermes_core.envs.session import Session, open_session
    from hermes_core.envs.soundness import Finding, ItemResult
    from hermes_core.envs.store import read_records
    from hermes_core.envs.summary import RunSummary
    from hermes_core.envs.tokens import TokenSequence
    from hermes_core.envs.tool_context import ToolContext
    from hermes_core.envs.validate import Validation, validate
    from hermes_core.errors import (
        AcquireTimeout,
        ChannelLost,
        CommandError,
        ConfigError,
        DatasetError,
        Disturbed,
        ErrorKind,
        FailureKind,
        HermesError,
        ImageError,
        InfraError,
        ModelError,
        OutputError,
        PluginError,
        PolicyError,
        ProvisionError,
        RolloutEnded,
        SandboxLost,
        SetupFailed,
        SlotLost,
        StaleSlotError,
        ToolArgumentError,
        UnknownNameError,
        UsageError,
        VerifierError,
        nearest_hint,
    )
    from hermes_core.export.card import Export
    from hermes_core.export.exporting import export_run
    from hermes_core.export.merge import Merge, merge_runs
    from hermes_core.export.selection import ExportFilters
    from hermes_core.mcp.servers import McpServer
    from hermes_core.plugins.hookspecs import hookimpl
    from hermes_core.plugins.registry import Registrar, ToolRegistrar
    from hermes_core.printing import say
    from hermes_core.runtime import Runtime
    from hermes_core.sandbox.channels.blocking import BlockingStreamChannel
    from hermes_core.sandbox.channels.process import AsyncioStreamChannel
    from hermes_core.sandbox.channels.sockets import SocketChannel
    from hermes_core.sandbox.channels.streams import AsyncStreamChannel
    from hermes_core.sandbox.commands import CommandResult, Cwd, ExecutionResult, SandboxImage, Slot, SlotCommands
    from hermes_core.sandbox.contract import (
        Backend,
        CanAttach,
        CanBuild,
        CanSnapshot,
        Capabilities,
        Channel,
        Diagnosis,
        Isolation,
        Network,
        Sandbox,
        SandboxConfig,
        SandboxInfo,
        SandboxSpec,
        SandboxStatus,
        SlotUser,
        TerminalVariables,
    )
    from hermes_core.sandbox.images import Image, ImageBuild, context_digest, write_context
    from hermes_core.sandbox.pool.preparation import NewSandbox
    from hermes_core.settings import Settings, read_profiles
    from hermes_core.sink import Sink
    from hermes_core.terminal import cleanup_vm, terminal_tool
    from hermes_core.tool_backend import ToolBackend
    from hermes_core.tools.base import CallContext, Tool, ToolParams
    from hermes_core.tools.functions import function_tool
    from hermes_core.validation import validated
    from hermes_core.workers import Workers, begin_thread

_PLACES = {
    "Agent": "hermes_core.agents.base",
    "AgentResult": "hermes_core.agents.base",
    "AgentSettings": "hermes_core.agents.base",
    "AgentTask": "hermes_core.agents.base",
    "CallError": "hermes_core.agents.base",
    "CallErrorKind": "hermes_core.agents.base",
    "CallRecord": "hermes_core.agents.base",
    "StopReason": "hermes_core.agents.base",
    "ToolAnswer": "hermes_core.agents.base",
    "TurnRecord": "hermes_core.agents.base",
    "run_calls": "hermes_core.agents.calls",
    "Chat": "hermes_core.agents.chat",
    "ExactAgent": "hermes_core.agents.exact",
    "BadCompletion": "hermes_core.agents.failures",
    "Served": "hermes_core.agents.generate",
    "TokenServer": "hermes_core.agents.generate",
    "open_exact_agent": "hermes_core.agents.opening",
    "ParsedCall": "hermes_core.agents.parsers.base",
    "ParsedText": "hermes_core.agents.parsers.base",
    "ParseProblem": "hermes_core.agents.parsers.base",
    "Parser": "hermes_core.agents.parsers.base",
    "Endpoint": "hermes_core.agents.retries",
    "BrokenOff": "hermes_core.aio",
    "LoopThread": "hermes_core.aio",
    "SingleFlight": "hermes_core.aio",
    "TaskSet": "hermes_core.aio",
    "alongside": "hermes_core.aio",
    "RunCommand": "hermes_core.cli.run_command",
    "carry_out": "hermes_core.cli.run_command",
    "chosen_agent": "hermes_core.cli.run_command",
    "Cheat": "hermes_core.cheats",
    "shell_cheat": "hermes_core.cheats",
    "shell_cheats": "hermes_core.cheats",
    "usual_cheats": "hermes_core.cheats",
    "Environment": "hermes_core.environment",
    "EnvironmentConfig": "hermes_core.environment",
    "FollowUp": "hermes_core.environment",
    "Item": "hermes_core.environment",
    "Need": "hermes_core.environment",
    "read_rows": "hermes_core.envs.datasets",
    "DrivenRollout": "hermes_core.envs.driven",
    "DrivenRun": "hermes_core.envs.driven_run",
    "Group": "hermes_core.envs.group",
    "GroupRoller": "hermes_core.envs.group",
    "Rolled": "hermes_core.envs.group",
    "Fresh": "hermes_core.envs.leased_slot",
    "LeasedSlot": "hermes_core.envs.leased_slot",
    "RunOptions": "hermes_core.envs.options",
    "PytestReport": "hermes_core.envs.pytest_run",
    "ReportStatus": "hermes_core.envs.pytest_run",
    "run_pytest": "hermes_core.envs.pytest_run",
    "Record": "hermes_core.envs.record",
    "record_schema": "hermes_core.envs.record",
    "rescore": "hermes_core.envs.rescore",
    "Rollout": "hermes_core.envs.rollout",
    "RolloutContext": "hermes_core.envs.rollout",
    "checked_row": "hermes_core.envs.rows",
    "load_rows": "hermes_core.envs.rows",
    "read_jsonl": "hermes_core.envs.rows",
    "run_rollouts": "hermes_core.envs.runner",
    "Session": "hermes_core.envs.session",
    "open_session": "hermes_core.envs.session",
    "Finding": "hermes_core.envs.soundness",
    "ItemResult": "hermes_core.envs.soundness",
    "read_records": "hermes_core.envs.store",
    "RunSummary": "hermes_core.envs.summary",
    "TokenSequence": "hermes_core.envs.tokens",
    "ToolContext": "hermes_core.envs.tool_context",
    "validate": "hermes_core.envs.validate",
    "Validation": "hermes_core.envs.validate",
    "AcquireTimeout": "hermes_core.errors",
    "ChannelLost": "hermes_core.errors",
    "CommandError": "hermes_core.errors",
    "ConfigError": "hermes_core.errors",
    "DatasetError": "hermes_core.errors",
    "Disturbed": "hermes_core.errors",
    "ErrorKind": "hermes_core.errors",
    "FailureKind": "hermes_core.errors",
    "HermesError": "hermes_core.errors",
    "ImageError": "hermes_core.errors",
    "InfraError": "hermes_core.errors",
    "ModelError": "hermes_core.errors",
    "OutputError": "hermes_core.errors",
    "PluginError": "hermes_core.errors",
    "PolicyError": "hermes_core.errors",
    "ProvisionError": "hermes_core.errors",
    "RolloutEnded": "hermes_core.errors",
    "SandboxLost": "hermes_core.errors",
    "SetupFailed": "hermes_core.errors",
    "SlotLost": "hermes_core.errors",
    "StaleSlotError": "hermes_core.errors",
    "ToolArgumentError": "hermes_core.errors",
    "UnknownNameError": "hermes_core.errors",
    "UsageError": "hermes_core.errors",
    "VerifierError": "hermes_core.errors",
    "nearest_hint": "hermes_core.errors",
    "Export": "hermes_core.export.card",
    "export_run": "hermes_core.export.exporting",
    "Merge": "hermes_core.export.merge",
    "merge_runs": "hermes_core.export.merge",
    "ExportFilters": "hermes_core.export.selection",
    "McpServer": "hermes_core.mcp.servers",
    "hookimpl": "hermes_core.plugins.hookspecs",
    "Registrar": "hermes_core.plugins.registry",
    "ToolRegistrar": "hermes_core.plugins.registry",
    "say": "hermes_core.printing",
    "Runtime": "hermes_core.runtime",
    "BlockingStreamChannel": "hermes_core.sandbox.channels.blocking",
    "AsyncioStreamChannel": "hermes_core.sandbox.channels.process",
    "SocketChannel": "hermes_core.sandbox.channels.sockets",
    "AsyncStreamChannel": "hermes_core.sandbox.channels.streams",
    "SlotCommands": "hermes_core.sandbox.commands",
    "Backend": "hermes_core.sandbox.contract",
    "CanAttach": "hermes_core.sandbox.contract",
    "CanBuild": "hermes_core.sandbox.contract",
    "CanSnapshot": "hermes_core.sandbox.contract",
    "Capabilities": "hermes_core.sandbox.contract",
    "Channel": "hermes_core.sandbox.contract",
    "Diagnosis": "hermes_core.sandbox.contract",
    "Isolation": "hermes_core.sandbox.contract",
    "Network": "hermes_core.sandbox.contract",
    "Sandbox": "hermes_core.sandbox.contract",
    "SandboxConfig": "hermes_core.sandbox.contract",
    "SandboxInfo": "hermes_core.sandbox.contract",
    "SandboxSpec": "hermes_core.sandbox.contract",
    "SandboxStatus": "hermes_core.sandbox.contract",
    "SlotUser": "hermes_core.sandbox.contract",
    "TerminalVariables": "hermes_core.sandbox.contract",
    "CommandResult": "hermes_core.sandbox.commands",
    "ExecutionResult": "hermes_core.sandbox.commands",
    "Cwd": "hermes_core.sandbox.commands",
    "SandboxImage": "hermes_core.sandbox.commands",
    "write_context": "hermes_core.sandbox.images",
    "context_digest": "hermes_core.sandbox.images",
    "ImageBuild": "hermes_core.sandbox.images",
    "Image": "hermes_core.sandbox.images",
    "Slot": "hermes_core.sandbox.commands",
    "NewSandbox": "hermes_core.sandbox.pool.preparation",
    "Settings": "hermes_core.settings",
    "read_profiles": "hermes_core.settings",
    "Sink": "hermes_core.sink",
    "cleanup_vm": "hermes_core.terminal",
    "complete": "hermes_core.aio",
    "terminal_tool": "hermes_core.terminal",
    "ToolBackend": "hermes_core.tool_backend",
    "CallContext": "hermes_core.tools.base",
    "Tool": "hermes_core.tools.base",
    "ToolParams": "hermes_core.tools.base",
    "function_tool": "hermes_core.tools.functions",
    "validated": "hermes_core.validation",
    "Workers": "hermes_core.workers",
    "begin_thread": "hermes_core.workers",
}
"""The names that are loaded at their first use, each with its module."""

__all__ = [
    "PLUGIN_API",
    "AcquireTimeout",
    "Agent",
    "AgentResult",
    "AgentSettings",
    "AgentTask",
    "AsyncStreamChannel",
    "AsyncioStreamChannel",
    "Backend",
    "BadCompletion",
    "BlockingStreamChannel",
    "BrokenOff",
    "CallContext",
    "CallError",
    "CallErrorKind",
    "CallRecord",
    "CanAttach",
    "CanBuild",
    "CanSnapshot",
    "Capabilities",
    "Channel",
    "ChannelLost",
    "Chat",
    "Cheat",
    "CommandError",
    "CommandResult",
    "ConfigError",
    "Cwd",
    "DatasetError",
    "Diagnosis",
    "Disturbed",
    "DrivenRollout",
    "DrivenRun",
    "Endpoint",
    "Environment",
    "EnvironmentConfig",
    "ErrorKind",
    "ExactAgent",
    "ExecutionResult",
    "Export",
    "ExportFilters",
    "FailureKind",
    "Finding",
    "FollowUp",
    "Fresh",
    "Group",
    "GroupRoller",
    "HermesError",
    "Image",
    "ImageBuild",
    "ImageError",
    "InfraError",
    "Isolation",
    "Item",
    "ItemResult",
    "LeasedSlot",
    "LoopThread",
    "McpServer",
    "Merge",
    "ModelError",
    "Need",
    "Network",
    "NewSandbox",
    "OutputError",
    "ParseProblem",
    "ParsedCall",
    "ParsedText",
    "Parser",
    "PluginError",
    "PolicyError",
    "ProvisionError",
    "PytestReport",
    "Record",
    "Registrar",
    "ReportStatus",
    "Rolled",
    "Rollout",
    "RolloutContext",
    "RolloutEnded",
    "RunCommand",
    "RunOptions",
    "RunSummary",
    "Runtime",
    "Sandbox",
    "SandboxConfig",
    "SandboxImage",
    "SandboxInfo",
    "SandboxLost",
    "SandboxSpec",
    "SandboxStatus",
    "Served",
    "Session",
    "Settings",
    "SetupFailed",
    "SingleFlight",
    "Sink",
    "Slot",
    "SlotCommands",
    "SlotLost",
    "SlotUser",
    "SocketChannel",
    "StaleSlotError",
    "StopReason",
    "TaskSet",
    "TerminalVariables",
    "TokenSequence",
    "TokenServer",
    "Tool",
    "ToolAnswer",
    "ToolArgumentError",
    "ToolBackend",
    "ToolContext",
    "ToolParams",
    "ToolRegistrar",
    "TurnRecord",
    "UnknownNameError",
    "UsageError",
    "Validation",
    "VerifierError",
    "Workers",
    "__version__",
    "alongside",
    "begin_thread",
    "carry_out",
    "checked_row",
    "chosen_agent",
    "cleanup_vm",
    "complete",
    "context_digest",
    "export_run",
    "function_tool",
    "hookimpl",
    "load_rows",
    "merge_runs",
    "nearest_hint",
    "open_exact_agent",
    "open_session",
    "read_jsonl",
    "read_profiles",
    "read_records",
    "read_rows",
    "record_schema",
    "rescore",
    "run_calls",
    "run_pytest",
    "run_rollouts",
    "say",
    "shell_cheat",
    "shell_cheats",
    "terminal_tool",
    "usual_cheats",
    "validate",
    "validated",
    "write_context",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
