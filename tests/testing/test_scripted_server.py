"""The scripted model server, spoken to with a plain HTTP client and with raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import httpx
import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedCall, ScriptedServer, ToolScript, call


def client(server: ScriptedServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.base_url, trust_env=False, timeout=10)


async def ask(server: ScriptedServer, *messages: dict, **fields) -> httpx.Response:
    prompt = [{"role": "user", "content": "hi"}, *messages]
    async with client(server) as http:
        return await http.post("/chat/completions", json={"model": "scripted", "messages": prompt, **fields})


def said(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


async def test_a_reply_has_the_shape_of_the_api():
    reply = Reply("hm", [call("f", a=1), ScriptedCall("g", "{bad", id="")], reasoning="why", usage=(3, 4))
    async with ScriptedServer([reply]) as server:
        body = (await ask(server)).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", "hm", "why")
    first, second = message["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"a": 1}
    assert first["id"]
    assert (second["id"], second["function"]) == ("", {"name": "g", "arguments": "{bad"})


async def test_extra_keys_go_where_they_belong():
    reply = Reply("x", message_extra={"m": 1}, choice_extra={"token_ids": [1, 2]}, finish_reason="length")
    async with ScriptedServer([reply]) as server:
        choice = (await ask(server)).json()["choices"][0]
    assert (choice["token_ids"], choice["message"]["m"], choice["finish_reason"]) == ([1, 2], 1, "length")


async def test_a_list_serves_each_conversation_from_its_start():
    async with ScriptedServer([Reply("one"), Reply("two")]) as server:
        for _ in range(2):
            assert said(await ask(server))["content"] == "one"
        assert said(await ask(server, {"role": "assistant", "content": "one"}))["content"] == "two"
        over = await ask(server, *[{"role": "assistant", "content": "x"}] * 2)
    assert over.status_code == 400
    assert "no answer 3" in over.json()["error"]["message"]


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_function_of_the_request_answers(asynchronous):
    def plain(request):
        return Reply(request["messages"][-1]["content"].upper())

    async def later(request):
        await asyncio.sleep(0)
        return plain(request)

    async with ScriptedServer(later if asynchronous else plain) as server:
        assert said(await ask(server))["content"] == "HI"


@pytest.mark.parametrize("script", [lambda request: 1 / 0, lambda request: "text"])
async def test_a_script_that_fails_says_so_and_fails_the_block(script):
    with pytest.raises((ZeroDivisionError, TypeError)):
        async with ScriptedServer(script) as server:
            response = await ask(server)
    assert response.status_code == 400
    assert "the script failed" in response.json()["error"]["message"]


async def test_faults_come_first_and_once_each():
    faults = [Fault(429, "slow down", "rate", headers={"Retry-After": "7"}), Fault(500, body=b"junk")]
    async with ScriptedServer([Reply("ok")], faults=faults) as server:
        first, second, third = [await ask(server) for _ in range(3)]
    assert (first.status_code, first.headers["retry-after"]) == (429, "7")
    assert first.json()["error"] == {"message": "slow down", "type": "scripted", "param": None, "code": "rate"}
    assert (second.status_code, second.content) == (500, b"junk")
    assert said(third)["content"] == "ok"


async def test_a_cut_breaks_off_in_the_middle_of_the_body():
    async with ScriptedServer([Fault(body=b"x" * 1000, cut=True)]) as server:
        with pytest.raises(httpx.RemoteProtocolError, match="500 bytes, expected 1000"):
            await ask(server)


async def test_a_delay_delays_only_its_own_request():
    def script(request):
        return Reply("slow", delay_s=0.4) if request.get("slow") else Reply("fast")

    async with ScriptedServer(script) as server:
        order = []

        async def one(**fields):
            order.append(said(await ask(server, **fields))["content"])

        await asyncio.gather(one(slow=True), one(), one())
    assert order == ["fast", "fast", "slow"]


async def test_models_keys_and_paths():
    async with ScriptedServer([Reply("x")], models=("a", "b"), api_key="k") as server, client(server) as http:
        assert (await http.get("/models")).status_code == 401
        http.headers["authorization"] = "Bearer k"
        assert [model["id"] for model in (await http.get("/models")).json()["data"]] == ["a", "b"]
        assert (await http.get("/nothing")).status_code == 404
        unknown = await http.post("/chat/completions", json={"model": "c", "messages": []})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "scripted"}', b'{"messages": 3}'])
async def test_a_bad_request_is_refused_and_the_connection_lives_on(body):
    async with ScriptedServer([Reply("x")]) as server, client(server) as http:
        assert (await http.post("/chat/completions", content=body)).status_code == 400
        assert (await http.get("/models")).status_code == 200


async def test_a_completion_is_streamed_on_request():
    async with ScriptedServer([Reply("said", tool_calls=[call("terminal", command="ls")])]) as server:
        told = await ask(server, stream=True)
        assert (told.status_code, told.headers["content-type"]) == (200, "text/event-stream")
        events = [line.removeprefix("data: ") for line in told.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "said"
        calls = [made["function"] for delta in deltas for made in delta.get("tool_calls", ())]
        assert [made["name"] for made in calls if "name" in made] == ["terminal"]


async def test_a_request_that_is_too_long_is_refused_before_it_is_read():
    async with ScriptedServer([Reply("x")], max_request_bytes=100) as server:
        assert (await ask(server, padding="x" * 200)).status_code == 413


async def test_the_log_of_requests_is_bounded():
    async with ScriptedServer([Reply("x")], keep_requests=2) as server:
        for n in range(4):
            await ask(server, n=n)
        assert [request["n"] for request in server.requests] == [2, 3]
        assert server.request_count == 4


@pytest.mark.parametrize("bytes_sent", [b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET /v1/models HT", b"x" * 200_000])
async def test_what_is_not_http_ends_its_own_connection_only(bytes_sent):
    async with ScriptedServer([Reply("x")]) as server:
        port = int(server.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes_sent)
        writer.write_eof()
        try:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        except ConnectionError:
            pass
        writer.close()
        assert said(await ask(server))["content"] == "x"


async def test_leaving_ends_open_connections_and_running_answers():
    async with ScriptedServer([Reply("x", delay_s=60)]) as server:
        pending = asyncio.create_task(ask(server))
        while not server.requests:
            await asyncio.sleep(0.01)
        begin = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begin < 5
    with pytest.raises(httpx.HTTPError):
        await pending
    with pytest.raises(httpx.ConnectError):
        await ask(server)


def solver(prompt):
    listing = yield call("ls", of=prompt)
    name = listing["output"].split()[0]
    both = yield [call("read", path=name), call("test")]
    if not both[1]["output"]:
        yield Reply("thinking aloud", [call("write", path=name)])
    return "solved"


async def converse(server: ScriptedServer, prompt: str, tools) -> list[dict]:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": prompt}]
    async with client(server) as http:
        while True:
            body = {"model": "scripted", "messages": messages}
            message = said(await http.post("/chat/completions", json=body))
            messages.append(message)
            if not message.get("tool_calls"):
                return messages
            for made in message["tool_calls"]:
                told = tools(made["function"]["name"], json.loads(made["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": told})


@pytest.mark.parametrize("ticks", range(8))
async def test_leaving_ends_connections_that_are_being_accepted(ticks):
    async with ScriptedServer([Reply("never")]) as server:
        port = int(server.base_url.rpartition(":")[2].removesuffix("/v1"))

        async def ended() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await reader.read()
            finally:
                writer.close()

        clients = [asyncio.create_task(ended()) for _ in range(5)]
        for _ in range(ticks):
            await asyncio.sleep(0)
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*clients, return_exceptions=True)
    assert all(outcome == b"" or isinstance(outcome, OSError) for outcome in outcomes), outcomes


async def test_a_tool_script_decides_by_what_the_tools_said():
    def tools(name, arguments):
        output = {"ls": f"{arguments.get('of')}.py b.py", "test": arguments.get("of")}
        return json.dumps({"output": output.get(name, "")})

    async with ScriptedServer(ToolScript(solver)) as server:
        talks = await asyncio.gather(*(converse(server, f"task{n}", tools) for n in range(5)))
    for n, messages in enumerate(talks):
        made = [c["function"] for m in messages for c in m.get("tool_calls", ())]
        assert [function["name"] for function in made] == ["ls", "read", "test", "write"]
        assert json.loads(made[1]["arguments"]) == {"path": f"task{n}.py"}
        assert messages[-1]["content"] == "solved"


async def test_a_tool_script_takes_another_way_when_the_tools_say_so():
    def tools(name, arguments):
        return json.dumps({"output": "passed" if name == "test" else "a.py"})

    async with ScriptedServer(ToolScript(solver)) as server:
        messages = await converse(server, "t", tools)
    assert [c["function"]["name"] for m in messages for c in m.get("tool_calls", ())] == ["ls", "read", "test"]


async def test_a_tool_script_gets_text_that_is_no_json_as_it_is():
    def play(prompt):
        told = yield call("f")
        return Reply(f"it said {told!r}", usage=(1, 1))

    async with ScriptedServer(ToolScript(play)) as server:
        messages = await converse(server, "t", lambda name, arguments: "plain text")
    assert messages[-1]["content"] == "it said 'plain text'"


def yields(value):
    yield value


def returns(value):
    yield call("f")
    return value


@pytest.mark.parametrize(
    ("play", "told"),
    [
        (lambda prompt: "no yield", "write `yield` in it"),
        (lambda prompt: yields({"name": "f"}), "yielded {'name': 'f'}, and not a ScriptedCall"),
        (lambda prompt: yields([call("f"), "g"]), "and not a ScriptedCall"),
        (lambda prompt: returns(7), "returned 7, and not a text or a Reply"),
    ],
)
async def test_a_tool_script_of_the_wrong_kind_says_what_it_must_be(play, told):
    with pytest.raises(TypeError, match=re.escape(told)):
        async with ScriptedServer(ToolScript(play)) as server:
            with contextlib.suppress(AssertionError):  # it answers with 400
                await converse(server, "t", lambda name, arguments: "text")


async def test_an_error_of_the_block_itself_is_not_hidden_by_one_of_the_script():
    with pytest.raises(KeyError):
        async with ScriptedServer(lambda request: 1 / 0) as server:
            await ask(server)
            raise KeyError("mine")
