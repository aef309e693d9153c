"""The public names, each with the module that has it: for type checkers, and for `__init__.py`, which reads this."""

from hermes_core.agents.base import (
    MASKED as MASKED,
    Agent as Agent,
    AgentResult as AgentResult,
    AgentSettings as AgentSettings,
    AgentSlot as AgentSlot,
    AgentTask as AgentTask,
    CallError as CallError,
    CallErrorKind as CallErrorKind,
    CallRecord as CallRecord,
    CanCheckEndpoint as CanCheckEndpoint,
    InstallableProgram as InstallableProgram,
    Message as Message,
    StopReason as StopReason,
    ToolAnswer as ToolAnswer,
    ToolError as ToolError,
    TurnRecord as TurnRecord,
    Usage as Usage,
)
from hermes_core.agents.calls import run_calls as run_calls
from hermes_core.agents.endpoint.errors import (
    BadCompletion as BadCompletion,
    ContextLengthExceeded as ContextLengthExceeded,
    ConversationRefused as ConversationRefused,
    EndpointDown as EndpointDown,
    HttpRefusal as HttpRefusal,
    ResponseTooLarge as ResponseTooLarge,
    as_model_error as as_model_error,
)
from hermes_core.agents.endpoint.request import Endpoint as Endpoint
from hermes_core.agents.exact.agent import ExactAgent as ExactAgent
from hermes_core.agents.exact.chat import Chat as Chat
from hermes_core.agents.exact.factory import (
    AgentContext as AgentContext,
    CanOpen as CanOpen,
    open_exact_agent as open_exact_agent,
)
from hermes_core.agents.exact.generate import Served as Served, TokenServer as TokenServer
from hermes_core.agents.loop import (
    CanUseModel as CanUseModel,
    ChatServer as ChatServer,
    KeepsState as KeepsState,
    SharesModel as SharesModel,
)
from hermes_core.agents.model import (
    ExactSettings as ExactSettings,
    ModelAgent as ModelAgent,
    derive_seed as derive_seed,
)
from hermes_core.agents.parsers.base import (
    ParsedCall as ParsedCall,
    ParsedText as ParsedText,
    ParseProblem as ParseProblem,
    Parser as Parser,
)
from hermes_core.agents.replies import ModelReply as ModelReply, ToolCall as ToolCall
from hermes_core.aio import (
    BrokenOff as BrokenOff,
    LoopThread as LoopThread,
    SingleFlight as SingleFlight,
    TaskSet as TaskSet,
    alongside as alongside,
    cancel as cancel,
    complete as complete,
    repeat_call as repeat_call,
    together as together,
)
from hermes_core.cheats import (
    PASS_ALL as PASS_ALL,
    Cheat as Cheat,
    shell_cheat as shell_cheat,
    file_cheats as file_cheats,
    find_file_names as find_file_names,
    shell_cheats as shell_cheats,
    usual_cheats as usual_cheats,
)
from hermes_core.cli.options import collect_settings as collect_settings, setting_option as setting_option
from hermes_core.cli.progress import progress_for as progress_for, progress_option as progress_option
from hermes_core.cli.run_command import RunCommand as RunCommand, carry_out as carry_out, choose_agent as choose_agent
from hermes_core.datasets.files import read_rows as read_rows
from hermes_core.datasets.intake import DatasetConfig as DatasetConfig, Intake as Intake
from hermes_core.datasets.rows import validate_row as validate_row, load_rows as load_rows, read_jsonl as read_jsonl
from hermes_core.environment import (
    CanScorePatch as CanScorePatch,
    Environment as Environment,
    EnvironmentConfig as EnvironmentConfig,
    FollowUp as FollowUp,
    Item as Item,
    Need as Need,
    Score as Score,
)
from hermes_core.errors import (
    AcquireTimeout as AcquireTimeout,
    ChannelLost as ChannelLost,
    CommandError as CommandError,
    ConfigError as ConfigError,
    DatasetError as DatasetError,
    Disturbed as Disturbed,
    ErrorKind as ErrorKind,
    FailureKind as FailureKind,
    HermesError as HermesError,
    ImageError as ImageError,
    InfraError as InfraError,
    ModelError as ModelError,
    OutputError as OutputError,
    PluginError as PluginError,
    PolicyError as PolicyError,
    ProvisionError as ProvisionError,
    RolloutEnded as RolloutEnded,
    SandboxLost as SandboxLost,
    SetupFailed as SetupFailed,
    SlotLost as SlotLost,
    StaleSlotError as StaleSlotError,
    ToolArgumentError as ToolArgumentError,
    UnknownNameError as UnknownNameError,
    UsageError as UsageError,
    VerifierError as VerifierError,
    describe as describe,
    nearest_hint as nearest_hint,
)
from hermes_core.export.card import Export as Export
from hermes_core.export.exporting import export_run as export_run
from hermes_core.export.merge import Merge as Merge, merge_runs as merge_runs
from hermes_core.export.selection import ExportFilters as ExportFilters
from hermes_core.handles import ExecTool as ExecTool, RolloutHandle as RolloutHandle, SlotHandle as SlotHandle
from hermes_core.mcp.servers import McpServer as McpServer
from hermes_core.plugins.hookspecs import hookimpl as hookimpl
from hermes_core.plugins.registry import Registrar as Registrar, ToolRegistrar as ToolRegistrar
from hermes_core.printing import say as say
from hermes_core.pytest_runner.run import (
    PytestReport as PytestReport,
    ReportStatus as ReportStatus,
    run_pytest as run_pytest,
)
from hermes_core.records.record import STAGES as STAGES, Record as Record, record_schema as record_schema
from hermes_core.records.run_files import LineFile as LineFile
from hermes_core.records.store import read_records as read_records, write_bytes as write_bytes
from hermes_core.records.summary import (
    SOLVED as SOLVED,
    NoProgress as NoProgress,
    Progress as Progress,
    RunSummary as RunSummary,
    Standing as Standing,
)
from hermes_core.records.tokens import TokenSequence as TokenSequence
from hermes_core.rollout.leased_slot import LeasedSlot as LeasedSlot
from hermes_core.rollout.rollout import RolloutContext as RolloutContext
from hermes_core.rollout.starvation import watch_for_starvation as watch_for_starvation
from hermes_core.rollout.tool_context import ToolContext as ToolContext
from hermes_core.runs.external_agent import DrivenRollout as DrivenRollout
from hermes_core.runs.group import Group as Group, GroupRoller as GroupRoller, Rolled as Rolled
from hermes_core.runs.options import RunOptions as RunOptions
from hermes_core.runs.runner import run_rollouts as run_rollouts
from hermes_core.runs.session import Session as Session, open_session as open_session
from hermes_core.runs.trainer import (
    SharedRun as SharedRun,
    TrainerRun as TrainerRun,
    check_temperature as check_temperature,
    open_trainer_session as open_trainer_session,
)
from hermes_core.runtime import Runtime as Runtime
from hermes_core.sandbox.channels.blocking import BlockingStreamChannel as BlockingStreamChannel
from hermes_core.sandbox.channels.process import AsyncioStreamChannel as AsyncioStreamChannel
from hermes_core.sandbox.channels.sockets import SocketChannel as SocketChannel
from hermes_core.sandbox.channels.streams import AsyncStreamChannel as AsyncStreamChannel
from hermes_core.sandbox.commands import (
    CommandResult as CommandResult,
    Connection as Connection,
    Cwd as Cwd,
    ExecutionResult as ExecutionResult,
    SandboxImage as SandboxImage,
    Slot as Slot,
    SlotCommands as SlotCommands,
    WindowSize as WindowSize,
)
from hermes_core.sandbox.contract import (
    Backend as Backend,
    CanAttach as CanAttach,
    CanBuild as CanBuild,
    CanSnapshot as CanSnapshot,
    Capabilities as Capabilities,
    Channel as Channel,
    Diagnosis as Diagnosis,
    Isolation as Isolation,
    Network as Network,
    NetworkPlan as NetworkPlan,
    NetworkPolicy as NetworkPolicy,
    Phase as Phase,
    Sandbox as Sandbox,
    SandboxConfig as SandboxConfig,
    SandboxInfo as SandboxInfo,
    SandboxSpec as SandboxSpec,
    SandboxStatus as SandboxStatus,
    SlotUser as SlotUser,
    TerminalVariables as TerminalVariables,
)
from hermes_core.sandbox.images import (
    Image as Image,
    ImageBuild as ImageBuild,
    context_digest as context_digest,
    write_context as write_context,
)
from hermes_core.sandbox.uids import uid_base_in_own_kernel as uid_base_in_own_kernel
from hermes_core.sandbox.pool.checkpoint import Checkpoint as Checkpoint
from hermes_core.sandbox.pool.preparation import NewSandbox as NewSandbox
from hermes_core.sandbox.programs import (
    Flooded as Flooded,
    LineCutter as LineCutter,
    ProgramEnded as ProgramEnded,
    SlotProgram as SlotProgram,
)
from hermes_core.settings import Settings as Settings, read_profiles as read_profiles
from hermes_core.sink import Sink as Sink
from hermes_core.soundness.rescore import rescore as rescore
from hermes_core.soundness.validate import Validation as Validation, validate as validate
from hermes_core.soundness.verdicts import Finding as Finding, ItemResult as ItemResult
from hermes_core.terminal import cleanup_vm as cleanup_vm, terminal_tool as terminal_tool
from hermes_core.tool_backend import ToolBackend as ToolBackend
from hermes_core.tools.base import CallContext as CallContext, Tool as Tool, ToolParams as ToolParams
from hermes_core.tools.functions import function_tool as function_tool
from hermes_core.validation import validate_data as validate_data
from hermes_core.version import (
    PLUGIN_API as PLUGIN_API,
    __version__ as __version__,
    NotInstalledError as NotInstalledError,
    AdaptedPackage as AdaptedPackage,
)
from hermes_core.workers import Workers as Workers, begin_thread as begin_thread, call_in as call_in
