"""No way out: what an agent does, leaves, says or runs as a test ends in a reward, and never in a record without one.

Each row of `WAYS` is tried by an agent that has not done its work, in real sandboxes, beside others that have.
docs/how-it-works/threat-model.md has the table. What the infrastructure does by itself still is no reward.
"""

import asyncio
import json
import os
import signal

import hermes_docker
import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedCall, ScriptedServer

from hermes_core.agents.base import AgentSettings, StopReason
from hermes_core.agents.model import ModelAgent
from hermes_core.environment import Environment
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.tools.base import Tool, ToolParams

ROOT = os.geteuid() == 0
LOCAL = {"isolation": "user"} if ROOT else {"isolation": "namespace"}
WORK = "echo done > out.txt"
FLOOD_BYTES = 60_000_000
CALL_S = 20.0


def shell(*commands, **args):
    """Commands, one tool call each; that they fail, hang or kill themselves is theirs."""
    return [("terminal", {"command": command, "timeout": 5, **args}) for command in commands]


def deep(levels):
    value = "x"
    for _ in range(levels):
        value = {"command": value}
    return value


WAYS = {
    # --- its processes ---
    "does nothing": [],
    "kills the slot's parent": shell(*["kill -9 $PPID; sleep 0.1"] * 5),
    "kills all that it can": shell(*["kill -9 -1"] * 3),
    "kills the parent in the background for ever": shell(
        "setsid sh -c 'while :; do pkill -9 -f hermes; kill -9 -1; done' & sleep 0.2", "true", "true"
    ),
    "stops the slot's parent": shell("kill -STOP $PPID; sleep 0.1", "kill -STOP -1", "true"),
    "fills the table of processes": shell("for i in $(seq 400); do sleep 1000 & done", "true", "ls | wc -l"),
    "forks without end": shell("f() { f | f & }; f", "sleep 1; true"),
    "leaves processes that ignore signals": shell("trap '' TERM INT HUP; (while :; do sleep 0.1; done) & true"),
    "exits by every status": shell("exit 255", "kill -SEGV $$", "kill -9 $$", "kill -STOP $$"),
    # --- its descriptors and output ---
    "closes its descriptors": shell(
        "exec 0<&- 1>&- 2>&-; sleep 0.2", 'for n in $(seq 3 255); do eval "exec $n>&-"; done'
    ),
    "opens all that it may": shell("python3 -c 'import os\nwhile 1: os.dup(0)'", "ulimit -n"),
    "floods its output": shell(f"yes | head -c {FLOOD_BYTES}", f"head -c {FLOOD_BYTES} /dev/zero >&2"),
    "writes what is no text": shell("head -c 300000 /dev/urandom", r"printf '\377\0\355\240\200{\"ev\":\"done\"}\n'"),
    "holds its output open": shell("sleep 1000 & exec sleep 0"),
    # --- its files ---
    "fills the disk": shell("head -c 500M /dev/zero > full; head -c 500M /dev/zero > $HOME/full", "echo x > out.txt"),
    "takes every inode": shell(
        "mkdir many; cd many; python3 -c 'import itertools\nfor n in itertools.count(): open(str(n), \"w\")'"
    ),
    "removes its workspace": shell('cd /; chmod -R 777 "$OLDPWD"; rm -rf "$OLDPWD" "$HOME" "$TMPDIR"', "true"),
    "puts a file in its place": shell('d=$PWD; cd /; rm -rf "$d"; echo x > "$d"', "true"),
    "puts a link in its place": shell('d=$PWD; cd /; rm -rf "$d"; ln -s / "$d"', "true"),
    "locks its workspace": shell("chmod 000 . $HOME $TMPDIR", "true"),
    "gives its workspace an access list": shell(
        "setfacl -m u:0:0 -m o::rwx . || true; chattr +i . || true", "chmod 1777 ."
    ),
    "works where nothing is": shell("mkdir a; cd a; rmdir ../a; ls", "true", workdir="a"),
    "makes its result a directory": shell("mkdir out.txt"),
    "makes its result a pipe": shell("mkfifo out.txt"),
    "makes its result a device": shell("ln -s /dev/zero out.txt"),
    "makes its result unreadable": shell("echo done > out.txt; chmod 000 out.txt"),
    "makes its result a circle of links": shell("ln -s out.txt out.txt"),
    "names that are no text": shell(r"touch $(printf '\377\376') $(printf 'a\nb')", "rm -f out.txt"),
    "mounts over its workspace": shell("unshare -rm sh -c 'mount -t tmpfs none . && sleep 1000' &", "true"),
    # --- its tool calls ---
    "arguments of no kind": [
        ("terminal", value) for value in ({}, {"command": 5}, {"command": None}, {"x": 1}, deep(90))
    ],
    "arguments without end": [
        ("terminal", {"command": "#" * 20_000_000}),
        ("write_file", {"path": "a" * 9000, "content": ""}),
    ],
    "arguments that are no text": [("terminal", {"command": "echo \ud800 \0"}), ("read_file", {"path": "\0"})],
    "time limits that are none": [
        ("terminal", {"command": "true", "timeout": t}) for t in (-1, 0, 1 << 70, 1e308, "x")
    ],
    "tools that are not there": [("nothing", {}), ("", {}), ("terminal\n", {}), ("bash", {"command": "true"})],
    "tools that break": [("breaks", {"how": how}) for how in ("error", "recursion", "cancelled", "text", "group")],
}
FILLERS = {"fills the disk", "takes every inode"}
"""Those whose neighbours can't work: the slots of a sandbox have one disk."""
HONEST = {f"honest {number}": shell(WORK) for number in range(3)}


class ToolsThatBreak:
    """A plugin with a tool that runs in the driver and does what no tool should."""

    @hookimpl
    def hermes_register_tools(self, registry):
        class How(ToolParams):
            how: str

        async def breaks(context, args):
            if args.how == "recursion":
                return await breaks(context, args)
            if args.how == "cancelled":
                raise asyncio.CancelledError
            if args.how == "text":
                return "\ud800"
            if args.how == "group":
                raise ExceptionGroup("several", [ValueError("one"), OSError("two")])
            raise OSError("no")

        registry.add(Tool("breaks", How, breaks, "Breaks.", where="driver", toolsets=("terminal",)))


class Ways(Environment):
    """Asks for `out.txt`, and looks for it in a way that minds nothing that an agent could have left."""

    name = "ways"

    def __init__(self, ways, look="read_file"):
        super().__init__()
        self._ways, self._look = ways, look

    def items(self):
        return [{"id": way} for way in self._ways]

    def format_prompt(self, item):
        return item["id"]

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        commands = rollout.commands
        if self._look == "read_file":
            return float((await commands.read_file("out.txt", limit=100)).data == b"done\n")
        if self._look == "stat":
            return float((await commands.stat("out.txt")).kind == "file")
        if self._look == "directory":
            return float((await commands.run("cat out.txt", cwd="made/here")).text == "done\n")
        if self._look == "files":
            return float(b"it is done" in await rollout.files("made", max_bytes=1 << 20))
        if self._look == "diff":
            return float("done" in await rollout.diff("made"))
        if self._look == "write":
            await commands.write_file("made/check", b"x")
            return 0.0
        assert self._look == "slowly"
        return float((await commands.run("test ! -e slow || sleep 60; cat out.txt")).text == "done\n")


class Doing:
    """An agent that makes the calls of a table."""

    name = "doing"

    def __init__(self, ways, then=None):
        self._ways, self._then = ways, then

    async def run(self, task):
        result = task.result
        result.messages.extend(task.messages)
        for tool, arguments in self._ways[task.messages[-1]["content"]]:
            async with asyncio.timeout(CALL_S * 3):
                said = await task.tool_handler(tool, arguments, task.trajectory_id)
            result.messages.append({"role": "tool", "content": said[:1000]})
        if self._then is not None:
            await self._then(task)
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self):
        pass


async def outcomes(runtime, environment, agent, **options):
    """The record of each item."""
    found = {}
    defaults = {**LOCAL, "concurrency": 4, "infra_retries": 0}
    await run_rollouts(
        runtime, environment, agent, on_record=lambda r: found.update({r["item_id"]: r}), **{**defaults, **options}
    )
    return found


def summed_up(records):
    return {item: (record["reward"], record["failure"]) for item, record in records.items()}


@pytest.fixture
def settings(tmp_path):
    profile = {"tmpfs_size": 64, "max_processes": 128, "slots_per_sandbox": 8, "execution_timeout_s": CALL_S}
    return Settings(state_dir=tmp_path / "state", profiles={"default": profile})


@pytest.fixture
async def runtime(settings):
    async with Runtime(settings, load_entry_points=False, plugins=[ToolsThatBreak()]) as one:
        yield one


ELSEWHERE = [pytest.param(each, marks=pytest.mark.full) for each in ("local namespace", "docker user")]


@pytest.mark.parametrize("place", ["local user", *ELSEWHERE])
async def test_what_an_agent_does_in_its_slot(settings, place, request):
    backend, level = place.split()
    if not ROOT and level == "user":
        pytest.skip("a uid per slot takes root")
    options = {"isolation": level, "backend": backend}
    if backend == "docker":
        image = request.getfixturevalue("docker_images")[0]
        limits = {"image": image, "slots_per_sandbox": 8, "max_processes": 128, "execution_timeout_s": CALL_S}
        settings = settings.model_copy(
            update={"profiles": {"default": {**limits, "tmpfs": {"/data": "size=64m,mode=711"}}}}
        )
    ways, records = {**WAYS, **HONEST}, {}
    async with Runtime(settings, load_entry_points=False, plugins=[ToolsThatBreak(), hermes_docker]) as runtime:
        for some in (ways.keys() - FILLERS, FILLERS):
            asked = {way: calls for way, calls in ways.items() if way in some}
            records |= await outcomes(runtime, Ways(asked), Doing(asked), **options)
    blamed = {way: records[way]["messages"] for way in HONEST if records[way]["reward"] != 1.0}
    assert blamed == {}, "an honest agent was blamed"
    assert summed_up(records) == {way: (float(way in HONEST), None) for way in ways}


# --- what verification meets ------------------------------------------------------------------------------------------

LEFT = {
    "nothing": [],
    "a file in place of a directory": shell("echo done > made"),
    "a link to nowhere": shell("ln -s /nowhere made"),
    "a circle": shell("ln -s made made"),
    "a locked directory": shell("mkdir -p made/here; chmod 000 made"),
    "a pipe": shell("mkfifo made out.txt"),
    "more than is taken": shell("mkdir -p made/here; head -c 3M /dev/zero > made/here/big"),
    "a broken repository": shell("git init -q made; rm -rf made/.git/objects; echo x > made/.git/HEAD"),
    "what takes its time": shell("touch slow; mkfifo pipe"),
}


async def test_a_verification_that_fails_on_what_was_left_is_no_way_out(runtime):
    for look in ("stat", "directory", "files", "diff", "write", "slowly"):
        records = await outcomes(runtime, Ways(LEFT, look), Doing(LEFT), verify_timeout=5.0)
        assert summed_up(records) == dict.fromkeys(LEFT, (0.0, None)), look
        assert look != "slowly" or "not done after 5 s" in records["what takes its time"]["details"]["reason"]


class Faulty(Ways):
    """A verification that fails by itself, whatever the agent did."""

    def __init__(self, fault):
        super().__init__({"nothing": []})
        self._fault = fault

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        if self._fault == "prepared":
            await rollout.preparation.read_file("nothing")
        elif self._fault == "hangs":
            await asyncio.sleep(60)
        elif self._fault == "hangs on what is prepared":
            await rollout.preparation.run("sleep 60")
        raise ValueError("a mistake")


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", ["prepared", "hangs", "hangs on what is prepared", "raises"])
async def test_a_verification_that_fails_by_itself_is_no_zero(runtime, fault):
    record = (await outcomes(runtime, Faulty(fault), Doing({"nothing": []}), verify_timeout=2.0))["nothing"]
    assert (record["reward"], record["failure"]["kind"]) == (None, "verifier")


# --- a slot that does not die -----------------------------------------------------------------------------------------


@pytest.fixture
def impatient(change_guest):
    """A guest that waits two seconds, in place of two minutes, for what was killed to be dead."""
    change_guest("_PATIENCE_S = 120.0", "_PATIENCE_S = 2.0")


class Ghost:
    """A process of a slot's user that nobody in the sandbox can see or kill: one that takes for ever to die."""

    def __init__(self):
        self._processes = []

    async def haunt(self, task):
        said = await task.tool_handler("terminal", {"command": "id -u"}, task.trajectory_id)
        uid = int(json.loads(said)["output"])
        self._processes.append(await asyncio.create_subprocess_exec("sleep", "1000", user=uid, group=uid))

    async def haunt_and_use(self, task):
        await self.haunt(task)
        for command in ("kill -9 $PPID", "sleep 0.1", "true"):
            await task.tool_handler("terminal", {"command": command}, task.trajectory_id)

    async def lay(self):
        for process in self._processes:
            process.kill()
            await process.wait()


@pytest.mark.few(1)
@pytest.mark.skipif(not ROOT, reason="a uid per slot takes root")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("when", ["haunt", "haunt_and_use"])
async def test_a_slot_that_does_not_die_counts_as_nothing_done_and_the_pool_goes_on(settings, when):
    profile = {"slots_per_sandbox": 2, "max_sandboxes": 1}
    settings = settings.model_copy(update={"profiles": {"default": profile}})
    ghost, ways = Ghost(), {"haunts": shell(WORK)}
    try:
        async with Runtime(settings, load_entry_points=False, plugins=[ToolsThatBreak()]) as runtime:
            agent = Doing(ways, getattr(ghost, when))
            record = (await outcomes(runtime, Ways(ways), agent, infra_retries=2, concurrency=1))["haunts"]
            assert (record["reward"], record["failure"]) == (0.0, None)
            assert "of an earlier lease is not dead yet" in record["details"]["reason"]
            assert record["infra_retries"] == 0
    finally:
        await ghost.lay()


# --- what the model says ----------------------------------------------------------------------------------------------

LS = ScriptedCall("terminal", {"command": "ls"})
SAYS = {
    "nothing": [Reply("")],
    "no call, no end": [Reply("x" * 3_000_000, finish_reason="length")],
    "what the endpoint withholds": [Reply("", finish_reason="content_filter")],
    "calls of no tool": [
        Reply(tool_calls=[ScriptedCall("", ""), ScriptedCall("\ud83d", "{}"), ScriptedCall("x" * 5000, "{}")]),
        Reply("bye"),
    ],
    "calls with one id": [Reply(tool_calls=[ScriptedCall("terminal", {"command": "ls"}, id="a")] * 3), Reply("bye")],
    "calls with no id": [Reply(tool_calls=[ScriptedCall("terminal", {"command": "ls"}, id="")] * 3), Reply("bye")],
    "arguments that are no JSON": [
        Reply(
            tool_calls=[
                ScriptedCall("terminal", text) for text in ("{", "[" * 50_000, "9" * 5000, "NaN", '"', "\\ud800")
            ]
        ),
        Reply("bye"),
    ],
    "arguments that are deep": [Reply(tool_calls=[ScriptedCall("terminal", json.dumps(deep(300)))]), Reply("bye")],
    "more calls than there is room for": [
        Reply(tool_calls=[ScriptedCall("read_file", {"path": "a"})] * 500),
        Reply("bye"),
    ],
    "what the endpoint refuses": [Reply(tool_calls=[LS]), Fault(400, "the arguments are not valid")],
    "what the endpoint filters": [
        Reply(tool_calls=[LS]),
        Fault(400, "content management policy", code="content_filter"),
    ],
    "what can't be processed": [Reply(tool_calls=[LS]), Fault(422, "a name is missing")],
    "too much for the context": [Reply(tool_calls=[LS]), Fault(400, "too long", code="context_length_exceeded")],
    "too much for us": [Reply(tool_calls=[LS]), Reply("x" * 5_000_000)],
}


async def said(runtime, says):
    """The record of each conversation: its item is its prompt."""

    def answer(request):
        messages = request["messages"]
        return says[messages[0]["content"]][sum(message["role"] == "assistant" for message in messages)]

    async with ScriptedServer(answer) as server:
        settings = {"model": "scripted", "base_url": server.base_url, "max_retries": 0, "max_response_bytes": 4 << 20}
        agent = ModelAgent(AgentSettings(**settings))
        try:
            return await outcomes(runtime, Ways(says), agent)
        finally:
            await agent.aclose()


@pytest.mark.full
async def test_what_a_model_says(runtime):
    records = await said(runtime, SAYS)
    assert summed_up(records) == dict.fromkeys(SAYS, (0.0, None))
    assert records["what the endpoint refuses"]["stop_reason"] == "refused"
    assert records["too much for us"]["stop_reason"] == "length"


@pytest.mark.full
async def test_an_endpoint_that_fails_is_no_zero(runtime):
    says = {f"at once, {fault.status}": [fault] for fault in (Fault(400, "no tools"), *map(Fault, (401, 404, 500)))}
    says |= {"at once, no JSON": [Fault(200, body=b"<html>")]}
    says |= {f"on the way, {status}": [Reply(tool_calls=[LS]), Fault(status)] for status in (401, 429, 500, 503)}
    for what, answers in says.items():  # each a run of its own: an endpoint that is down ends all rollouts that ask it
        (record,) = (await said(runtime, {what: answers})).values()
        assert (record["reward"], record["failure"]["kind"]) == (None, "model"), what


# --- the infrastructure by itself -------------------------------------------------------------------------------------


class Sandboxes:
    """A plugin that knows which sandboxes there are."""

    def __init__(self):
        self.ids = []

    @hookimpl
    def hermes_sandbox_created(self, sandbox_id):
        self.ids.append(sandbox_id)


class Dying(Ways):
    """Its sandbox is ended by somebody else, while the agent works or while it is verified."""

    def __init__(self, runtime, sandboxes, when):
        super().__init__({"dies": []})
        self._runtime, self._sandboxes, self.when = runtime, sandboxes, when

    async def end(self):
        await self._runtime.backend("local").terminate_id(self._sandboxes.ids[-1])

    async def check(self, rollout):
        async def lay_out(fresh):
            if self.when == "laid out":
                await self.end()
            await fresh.commands.write_file("file", b"x")

        async def check(fresh):
            if self.when == "checked":
                await self.end()
            return await fresh.commands.run("sleep 1")

        return await rollout.check_afresh(lay_out, check, disturbed=lambda done: None)

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        try:
            await self.check(rollout)
        except Exception:
            return 0.0  # a hook that swallows it makes it no zero
        return 0.0


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["worked", "laid out", "checked"])
async def test_a_sandbox_that_dies_by_itself_is_never_a_reward(settings, when):
    sandboxes = Sandboxes()
    async with Runtime(settings, load_entry_points=False, plugins=[sandboxes]) as runtime:
        environment = Dying(runtime, sandboxes, when)

        async def work(task):
            if when == "worked":
                await environment.end()
            await task.tool_handler("terminal", {"command": "sleep 1"}, task.trajectory_id)

        record = (await outcomes(runtime, environment, Doing({"dies": []}, work), infra_retries=1))["dies"]
    assert (record["reward"], record["failure"]["kind"], record["infra_retries"]) == (None, "infra", 1)
    assert len(sandboxes.ids) == 2


# --- a neighbour that takes the memory --------------------------------------------------------------------------------

HOG = """\
import os, time
def there():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"the_check" in open(f"/proc/{pid}/cmdline", "rb").read():
                return True
        except OSError:
            pass
while not there():
    time.sleep(0.05)
time.sleep(0.5)
small = []
while there():  # each is smaller than what they take the memory from
    small.append(os.fork())
    if not small[-1]:
        held = bytearray(os.urandom(1)) * (2 << 20)
        time.sleep(30)
        os._exit(0)
for each in small:
    os.kill(each, 9)
"""


class Checked(Ways):
    """Checks in a fresh slot, by a process that takes some memory and some time."""

    def __init__(self):
        super().__init__({"honest": []})

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        async def lay_out(fresh):
            await fresh.commands.write_file("the_check.py", b"import time\nx = bytearray(60 << 20)\ntime.sleep(3)\n")

        async def check(fresh):
            async with fresh.processor():
                return await fresh.commands.run("exec python3 the_check.py")

        def disturbed(done):
            return "the check was killed" if done.signal == signal.SIGKILL else None

        done = await rollout.check_afresh(lay_out, check, disturbed=disturbed)
        return float(done.ok), {"exit": done.returncode}


async def test_a_check_that_a_neighbour_has_killed_is_repeated(settings, docker_images):
    profile = {"image": docker_images[0], "slots_per_sandbox": 4, "max_sandboxes": 1, "memory": 160}
    settings = settings.model_copy(update={"profiles": {"default": profile}})

    async def hog(task):
        if task.messages[-1]["content"] != "hog":
            return
        await task.tool_handler("write_file", {"path": "hog.py", "content": HOG}, task.trajectory_id)
        await task.tool_handler("terminal", {"command": "python3 hog.py & sleep 14"}, task.trajectory_id)

    class Both(Checked):
        def items(self):
            return [{"id": "honest"}, {"id": "hog"}]

    async with Runtime(settings, load_entry_points=False, plugins=[hermes_docker]) as runtime:
        agent = Doing({"honest": shell("sleep 2"), "hog": []}, hog)
        records = await outcomes(runtime, Both(), agent, backend="docker", isolation="user", concurrency=2)
    honest = records["honest"]
    assert (honest["reward"], honest["failure"]) == (1.0, None), honest["details"]
    assert honest["check_repeated"] == "the check was killed"
