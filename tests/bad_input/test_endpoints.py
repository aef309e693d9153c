"""A model's endpoint that is down, refuses, limits, breaks, talks nonsense, or talks to tools in ways it should not."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, ToolScript, call

Serve = Callable[..., list[str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(script, faults=…)`: a server in a thread of its own, and the options that make it the model."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[ScriptedServer] = []

    def start(script: object = (Reply("Done."),), **options: object) -> list[str]:
        server = ScriptedServer(script, **options)  # type: ignore[arg-type]
        servers.append(server)
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        return ["--model", "scripted", "--base-url", server.base_url, "--agent.max_retry_wait_s=0.01"]

    yield start
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


FOR_GOOD = {
    "wrong key": (Fault(401, "no such key", "invalid_api_key"), ["refused the API key (HTTP 401)", "valid"]),
    "forbidden": (Fault(403, "not yours"), ["refused the API key (HTTP 403): not yours"]),
    "no such model": (Fault(404, "what model?"), ["does not know the model 'scripted'", "ends in /v1"]),
    "no quota": (Fault(429, "pay first", "insufficient_quota"), ["no quota left", "waiting does not help"]),
}
"""What every other rollout would hear, too."""

FAILS = {
    "refused": (Fault(400, "tools are not supported"), 1, ["refused the request (HTTP 400)", "takes tools"]),
    "limits the rate": (Fault(429, "slow down"), 2, ["still limits the rate after 2 attempts", "concurrency"]),
    "broken": (Fault(500, "oops"), 2, ["failed after 2 attempts (HTTP 500): oops", "server's own log"]),
    "overloaded": (Fault(503, "later", headers={"Retry-After": "0"}), 2, ["failed after 2 attempts (HTTP 503)"]),
    "a web page": (Fault(body=b"<html>hello</html>"), 2, ["after 2 attempts", "base URL", "/v1"]),
    "other JSON": (Fault(body=b'{"a": 1}'), 2, ["after 2 attempts"]),
    "an empty answer": (Fault(body=b""), 2, ["after 2 attempts"]),
    "bytes": (Fault(body=b"\xff\xfe\x00"), 2, ["after 2 attempts"]),
    "cut off": (
        Fault(cut=True, body=b'{"choices": ['),
        2,
        ["broke off after 2 attempts", "check that the server runs"],
    ),
}
"""What is one rollout's, as the others are answered."""


def prompt_of(request: dict[str, Any]) -> str:
    """The first word of what the user asks: which case it is."""
    return str(next(message["content"] for message in request["messages"] if message["role"] == "user"))


def test_an_endpoint_that_fails_is_the_models_failure_and_says_what_to_do(hermes, tasks, serve, records, level):
    asked: Counter[str] = Counter()

    def fail(request: dict[str, Any]) -> Fault | Reply:
        asked[prompt_of(request)] += 1
        return FAILS[prompt_of(request)][0] if prompt_of(request) in FAILS else Reply("Done.")

    names = [name for failing in FAILS for name in (f"before {failing}", failing)]
    rows = [{"id": name, "prompt": name, "check": "true"} for name in names]
    done = hermes(
        *("rollout", "tasks", tasks(*rows), *serve(fail), "--agent.max_retries=1", "--out", "out", *level),
        *("--concurrency", "1"),
    )
    assert done.code == 3
    assert f"{len(FAILS)} of {2 * len(FAILS)} scored" in done.out
    done.has_no_noise()
    assert {name: asked[name] for name in FAILS} == {name: attempts for name, (_, attempts, _) in FAILS.items()}
    for record in records():
        if record["item_id"] not in FAILS:
            assert record["reward"] == 1.0
            continue
        message = record["failure"]["message"]
        assert (record["reward"], record["stop_reason"]) == (None, "model_error")
        assert (record["failure"]["kind"], record["failure"]["stage"]) == ("model", "agent")
        assert all(word in message for word in FAILS[record["item_id"]][2]), message
    assert len([line for line in done.out.splitlines() if line.startswith("  model: ")]) in (7, 8), "some say the same"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FOR_GOOD)
def test_an_endpoint_that_refuses_everybody_ends_the_run_at_once(hermes, tasks, serve, records, level, name):
    fault, words = FOR_GOOD[name]
    rows = [{"id": f"t{n}", "check": "true"} for n in range(40)]
    done = hermes("rollout", "tasks", tasks(*rows), *serve(lambda request: fault), "--out", "out", *level)
    assert done.code == 3
    done.has_no_noise()
    assert len(records()) <= 4, "those that were under way"
    assert {record["failure"]["kind"] for record in records()} == {"model"}
    assert all(word in done.out for word in words), done.out


def test_what_the_endpoint_does_not_have_is_found_before_the_first_sandbox(hermes, tasks, serve, level):
    for options in ({"api_key": "another"}, {"models": ["scripted-2"]}):
        done = hermes("rollout", "tasks", tasks(), *serve(**options), *level)
        assert (done.code, done.sandboxes) == (3, 0)
        done.says("refused the API key" if "api_key" in options else "did you mean 'scripted-2'?")


def test_a_host_that_does_not_exist_is_named(hermes, tasks, level):
    given = ["--model", "m", "--base-url", "http://no-such-host.invalid/v1", "--agent.max_retries=0"]
    done = hermes("rollout", "tasks", tasks(), *given, *level)
    assert (done.code, done.sandboxes) == (3, 0)
    done.says("the model endpoint http://no-such-host.invalid/v1 could not be reached")


def test_the_same_failure_of_many_rollouts_is_told_once(hermes, tasks, serve, level):
    def refuse(request: dict[str, Any]) -> Fault | Reply:
        return Reply("Done.") if prompt_of(request) == "first" else Fault(400, "no such thing")

    rows = [{"id": "first", "prompt": "first", "check": "true"}, *({"id": f"t{n}", "check": "true"} for n in range(15))]
    done = hermes("rollout", "tasks", tasks(*rows), *serve(refuse), "--concurrency", "1", *level)
    assert done.code == 3
    assert done.out.count("no such thing") == 1
    assert "failures: 15 model" in done.out
    assert "… (15 rollouts)" in done.out


def test_a_wrong_key_is_not_repeated_to_the_user(hermes, tasks, serve, records, level):
    secret = "sk-what-the-endpoint-echoes"
    echo = Fault(401, f"incorrect API key {secret}")
    done = hermes("rollout", "tasks", tasks(), *serve(faults=[echo]), *level, OPENAI_API_KEY=secret)
    assert (done.code, done.sandboxes) == (3, 0)
    assert secret not in done.out + done.err
    model = [*serve(lambda request: Reply("Hi.") if "max_tokens" in request else echo), "--agent.endpoint_patience_s=0"]
    done = hermes("rollout", "tasks", tasks(), *model, "--out", "out", *level, OPENAI_API_KEY=secret)
    assert done.code == 3
    assert "incorrect API key" in str(records())
    assert secret not in done.out + done.err + str(records())


def played(*calls: object) -> ToolScript:
    """A model that makes these calls, one a turn, whatever they answer; the answers are in the record."""

    def script(prompt: str):  # type: ignore[no-untyped-def]
        for one in calls:  # noqa: UP028 - the answers are sent in, which no list takes
            yield one
        return "Done."

    return ToolScript(script)


OUTSIDE = {
    "a file of the system": call("read_file", path="/etc/shadow"),
    "above the workspace": call("read_file", path="../../../../etc/shadow"),
    "another slot": call("write_file", path="../slot_99/x", content="x"),
    "the guest's own": call("write_file", path="/data/.hermes/x", content="x"),
    "a patch elsewhere": call("patch", path="/etc/passwd", old_string="root", new_string="toor"),
    "a directory elsewhere": call("terminal", command="true", workdir="/root"),
    "a directory that is none": call("terminal", command="true", workdir="/etc/passwd"),
    "a directory that is not there": call("terminal", command="true", workdir="no/such/place"),
}
WRONG = {
    "a NUL byte in the command": (call("terminal", command="echo a\0b"), "NUL"),
    "a NUL byte in a path": (call("read_file", path="a\0b"), "NUL"),
    "a NUL byte in a directory": (call("terminal", command="true", workdir="a\0b"), "NUL"),
    "a tool that does not exist": (call("termnal", command="ls"), "did you mean 'terminal'"),
    "a missing argument": (call("terminal"), "command"),
    "an argument too many": (call("terminal", command="ls", tiemout=3), "timeout"),
    "a wrong type": (call("terminal", command=["ls"]), "command"),
    "a negative time limit": (call("terminal", command="ls", timeout=-1), "timeout"),
    "no file": (call("read_file", path="gone.txt"), "gone.txt"),
    "an empty path": (call("write_file", path="", content="x"), "path"),
}


def answers(record: dict) -> list[str]:  # type: ignore[type-arg]
    return [message["content"] for message in record["messages"] if message["role"] == "tool"]


def test_what_a_model_calls_wrongly_is_answered_and_the_rollout_goes_on(hermes, tasks, serve, records, level):
    model = serve(played(*(one for one, _ in WRONG.values()), call("terminal", command="touch a")))
    done = hermes("rollout", "tasks", tasks(), *model, "--out", "out", *level)
    assert (done.code, "1 solved" in done.out) == (0, True), done.out
    done.has_no_noise()
    [record] = records()
    *told, last = answers(record)
    assert '"exit_code": 0' in last
    for (name, (_, word)), answer in zip(WRONG.items(), told, strict=True):
        assert '"error"' in answer, name
        assert word in answer, (name, answer)
        assert "Traceback" not in answer, name
        assert len(answer) < 1000, name
    assert record["tool_calls"]["executed_ok"] == 1


def test_nothing_outside_of_the_slot_is_reached(hermes, tasks, serve, records, isolates):
    model = serve(played(*OUTSIDE.values()))
    done = hermes("rollout", "tasks", tasks(), *model, "--out", "out", "--isolation", "user")
    assert done.code == 0, done.out
    done.has_no_noise()
    [record] = records()
    for name, answer in zip(OUTSIDE, answers(record), strict=True):
        assert '"error"' in answer, (name, answer)
        assert "root:" not in answer, (name, answer)


def test_output_that_is_no_text_and_files_that_are_none_are_told_as_such(hermes, tasks, serve, records, level):
    calls = [
        call("terminal", command="printf '\\377\\376 caf\\351 \\000 \\xf0\\x9f\\x99\\x82'"),
        call("terminal", command="head -c 1000 /dev/urandom > noise; head -c 1 /dev/zero >> noise"),
        call("terminal", command="printf 'caf\\351\\n' > latin"),
        call("read_file", path="noise"),
        call("read_file", path="latin"),
        call("search_files", pattern="caf", path="."),
    ]
    done = hermes("rollout", "tasks", tasks(), *serve(played(*calls)), "--out", "out", *level)
    assert done.code == 0, done.out
    done.has_no_noise()
    [record] = records()
    text, *written, noise, latin, found = answers(record)
    assert "\ufffd\ufffd caf\ufffd" in text
    assert "🙂" in text or "\\ud83d" in text
    assert all('"exit_code": 0' in each for each in written)
    assert "binary" in noise
    assert "caf" in latin
    assert "latin" in found


def test_a_full_disk_is_an_answer_and_not_a_failure_of_ours(hermes, tasks, serve, records, isolates):
    calls = [
        call("terminal", command="head -c 30000000 /dev/zero > big; echo status $?"),
        call("write_file", path="more", content="x" * 100_000),
        call("terminal", command="rm big; touch a"),
    ]
    given = ["--backend.tmpfs_size=10", "--isolation", "user", "--out", "out"]
    done = hermes("rollout", "tasks", tasks(), *serve(played(*calls)), *given)
    assert (done.code, "1 solved" in done.out) == (0, True), done.out
    done.has_no_noise()
    [record] = records()
    full, written, freed = answers(record)
    assert "No space left on device" in full
    assert '"error"' in written
    assert "space" in written
    assert '"exit_code": 0' in freed


def test_a_server_that_is_not_there_yet_is_waited_for(hermes, tasks, level):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    over = threading.Event()

    async def late() -> None:
        await asyncio.sleep(3)
        async with ScriptedServer([Reply("Done.")], port=port):
            await asyncio.to_thread(over.wait, 60)

    thread = threading.Thread(target=asyncio.run, args=(late(),))
    thread.start()
    try:
        given = ["--model", "scripted", "--base-url", f"http://127.0.0.1:{port}/v1"]
        done = hermes("rollout", "tasks", tasks({"id": "one", "check": "true"}), *given, *level)
    finally:
        over.set()
        thread.join()
    assert (done.code, "1 of 1 scored" in done.out) == (0, True), done.err
    assert "could not be reached" not in done.out
