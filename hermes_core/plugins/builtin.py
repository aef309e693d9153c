"""The built-in backends, agents, parsers, environments and tools, registered through the same hooks as any plugin."""

from __future__ import annotations

from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.plugins.registry import Registrar, ToolRegistrar
from hermes_core.tools.files import READ_FILE, WRITE_FILE
from hermes_core.tools.patch import PATCH
from hermes_core.tools.process import PROCESS
from hermes_core.tools.search import SEARCH_FILES
from hermes_core.tools.terminal import TERMINAL


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Register the backend that needs only this host."""
    registry.add(
        "local",
        "hermes_core.sandbox.local.backend:LocalBackend",
        summary="Process trees on this host, isolated as far as it allows: see `hermes-rl doctor`",
        requires=("Linux",),
    )


@hookimpl
def hermes_register_agents(registry: Registrar) -> None:
    """Register the model loop and the two baselines."""
    registry.add(
        "model",
        "hermes_core.agents.exact.factory:make_model",
        summary="Asks an OpenAI-compatible model for tool calls until it is done",
        requires=("a model endpoint",),
    )
    registry.add("oracle", "hermes_core.agents.baselines:OracleAgent", summary="Applies the reference solution")
    registry.add("nop", "hermes_core.agents.baselines:NopAgent", summary="Does nothing")


@hookimpl
def hermes_register_parsers(registry: Registrar) -> None:
    """Register the formats in which models write tool calls as text."""
    place = "hermes_core.agents.parsers"
    for name, module, summary, *aliases in (
        ("hermes", "hermes", "JSON between <tool_call> tags: Hermes 2 and 3"),
        ("qwen", "hermes", "JSON between <tool_call> tags: Qwen 2.5, Qwen 3, Trinity", "trinity"),
        ("longcat", "hermes", "JSON between <longcat_tool_call> tags: LongCat"),
        ("ernie45", "hermes", "JSON between <tool_call> tags, beside <response>: ERNIE 4.5"),
        ("granite", "hermes", "A JSON list behind a mark: Granite 3"),
        ("hunyuan_a13b", "hermes", "A JSON list between <tool_calls> tags: Hunyuan A13B, Jamba", "jamba"),
        ("phi4_mini_json", "hermes", "A JSON list after `functools`: Phi 4 mini"),
        ("cohere", "hermes", "A JSON list between marks: Command R7B, Command A", "cohere_command3", "cohere_command4"),
        ("apertus", "hermes", "A JSON list of {name: arguments}: Apertus"),
        ("nemotron_nano_v2", "hermes", "A JSON list between <TOOLCALL> tags: Nemotron Nano v2", "nemotron_json"),
        ("gigachat3", "hermes", "JSON in a message to a function: GigaChat 3"),
        ("granite_20b_fc", "hermes", "JSON behind <function_call>: Granite 20B"),
        ("interns1", "hermes", "JSON between marks: InternLM 2, Intern-S1", "internlm"),
        ("inkling", "hermes", "JSON in a message of its own: Inkling"),
        ("llama3_json", "llama", "Bare JSON: Llama 3.1 and later"),
        ("llama4_json", "llama", "Bare JSON: Llama 4"),
        ("xlam", "llama", "A bare JSON list: xLAM 2"),
        ("mistral", "mistral", "What [TOOL_CALLS] begins, in all its versions"),
        ("deepseek_v3", "arguments", "JSON in a fenced block between marks: DeepSeek V3, R1"),
        ("deepseek_v3_1", "arguments", "JSON between marks: DeepSeek V3.1", "deepseek_v31"),
        ("kimi_k2", "arguments", "JSON between marks, with ids: Kimi K2"),
        ("solar_open", "arguments", "JSON between marks: Solar Open"),
        ("glm45", "xml", "A tag for each argument: GLM 4.5, 4.6, Laguna, Spark 2.5", "poolside_v1", "spark25"),
        ("glm47", "xml", "A tag for each argument, without line breaks: GLM 4.7, Ling 3", "ling3"),
        ("hunyuan", "xml", "A tag for each argument, in sections: Hunyuan 3", "hy_v3"),
        (
            *("qwen3_coder", "xml", "A tag for each argument: Qwen3-Coder, Nemotron 3, Step 3.5"),
            *("qwen3_xml", "nemotron_v3", "step3p5", "step5"),
        ),
        ("mimo", "xml", "A tag for each argument, each on one line: MiMo V2"),
        ("seed_oss", "xml", "A tag for each argument, between <seed:tool_call> tags: Seed-OSS"),
        ("minimax_m2", "xml", "Tags with names in attributes: MiniMax M2"),
        ("dots", "xml", "Tags with names in attributes, in a section of its own: dots"),
        ("minicpm5", "xml", "Tags with names in attributes, without a section: MiniCPM 5"),
        ("minimax_m3", "nested", "A tag for each argument and for each part of it: MiniMax M3"),
        ("deepseek_v3_2", "xml", "Marked tags with types: DeepSeek V3.2", "deepseek_v32"),
        ("deepseek_v4", "xml", "Marked tags with types, in another section: DeepSeek V4"),
        ("gigachat35", "xml", "Marked tags with types, with another mark: GigaChat 3.5"),
        ("kimi_k3", "xml", "Special tokens with types: Kimi K3"),
        ("step3", "xml", "Tags between marks: Step 3"),
        ("pythonic", "pythonic", "A bare list of Python's calls: Llama 3.2, ToolACE"),
        ("llama4_pythonic", "pythonic", "A list of Python's calls, perhaps behind a mark: Llama 4"),
        ("lfm2", "pythonic", "A list of Python's calls between marks: LFM2, LFM2.5"),
        ("olmo3", "pythonic", "Python's calls, each on a line, between tags: OLMo 3"),
        ("gemma4", "gemma", "Marks, and strings between tokens: Gemma 4"),
        ("functiongemma", "gemma", "Marks, and strings between other tokens: FunctionGemma"),
        ("gpt_oss", "harmony", "Messages to functions: gpt-oss", "openai"),
        ("auto", "auto", "All of them, told apart by their marks"),
    ):
        registry.add(name, f"{place}.{module}:{name}", aliases=aliases, summary=summary)


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """Register the environments that need no code."""
    registry.add(
        "prompts",
        "hermes_core.datasets.prompts:PromptsEnvironment",
        summary="A JSONL file of prompts, without a check: for making data",
        requires=("a file of prompts",),
    )
    registry.add(
        "tasks",
        "hermes_core.datasets.tasks:TasksEnvironment",
        summary="A JSONL file of {id, prompt, setup, check, solution} commands",
        requires=("a task file",),
    )


@hookimpl
def hermes_register_tools(registry: ToolRegistrar) -> None:
    """Register terminal and file tools, and the usual choices of them."""
    for tool in (TERMINAL, PROCESS, READ_FILE, WRITE_FILE, PATCH, SEARCH_FILES):
        registry.add(tool)
    registry.add_toolset("terminal", tools=("terminal", "process"), summary="Run commands, also in the background")
    registry.add_toolset(
        "file", tools=("read_file", "write_file", "patch", "search_files"), summary="Read, write, change and find files"
    )
    registry.add_toolset("debugging", includes=("terminal", "file"), summary="Commands and files")
    registry.add_toolset("safe", tools=("read_file", "search_files"), summary="Nothing that runs commands or writes")
    registry.add_distribution("default", {"terminal": 100, "file": 100}, summary="Everything of the core")
    registry.add_distribution("development", {"terminal": 80, "file": 80}, summary="Mostly both")
    registry.add_distribution("terminal_only", {"terminal": 100, "file": 100}, summary="Both, nothing of plugins")
    registry.add_distribution("terminal_tasks", {"terminal": 97, "file": 97}, summary="Nearly always both")
    registry.add_distribution("balanced", {"terminal": 50, "file": 50}, summary="Each half of the time")
