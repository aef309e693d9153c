"""A small agent that speaks ACP, of the standard library alone. Its arguments: a folder of its own, and what it does
besides, or wrong."""

import json
import os
import queue
import subprocess
import sys
import threading
import urllib.request

FOLDER, MODES = sys.argv[1], sys.argv[2:]
BASH = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
cancelled, answers, lock = threading.Event(), queue.Queue(), threading.Lock()


def send(**message):
    with lock:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def update(kind, **more):
    send(method="session/update", params={"sessionId": "s", "update": {"sessionUpdate": kind, **more}})


def ask_client(number, method, **params):
    send(id=number, method=method, params={"sessionId": "s", **params})
    answer = answers.get()
    assert answer["id"] == number, answer
    return answer


def ask_model(messages):
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": messages,
        "tools": [{"type": "function", "function": BASH}],
    }
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]


def ask_server(server):
    """Return the name of the only tool of an MCP server."""
    assert server["type"] == "http" and server["name"] == "far", server
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    headers |= {each["name"]: each["value"] for each in server["headers"]}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    with urllib.request.urlopen(urllib.request.Request(server["url"], body, headers)) as response:
        return json.load(response)["result"]["tools"][0]["name"]


def bash(call):
    if "asks" in MODES:
        kinds = ("reject_once", "allow_once", "allow_always", "reject_always")
        options = [{"optionId": "id of " + kind, "name": kind, "kind": kind} for kind in kinds]
        outcome = ask_client("why", "session/request_permission", toolCall={"toolCallId": call["id"]}, options=options)
        assert outcome["result"] == {"outcome": {"outcome": "selected", "optionId": "id of allow_always"}}, outcome
    command = json.loads(call["function"]["arguments"])["command"]
    done = subprocess.Popen(
        ["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    while done.poll() is None and not cancelled.wait(0.02):
        pass
    if done.returncode is None:
        os.killpg(done.pid, 9)
    said = done.communicate()[0].decode() + f"\n[exit status {done.returncode}]"
    update("tool_call_update", toolCallId=call["id"], status="completed")
    return {"role": "tool", "tool_call_id": call["id"], "content": said}


def noise():
    print("Welcome to the agent!", "{not json", "[1, 2]", '"text"', "{}", "[" * 100000, sep="\n", flush=True)
    for number in (1, 99, True, None, "1", [1], {"a": 1}, 3.0):
        send(id=number, result={"stopReason": "max_tokens"} if number != 1 else {})
    send(id=[1], error=5)
    send(method="session/update", params=[1])
    send(method="session/update", params={"update": {"sessionUpdate": {"a": 1}}})
    for number in range(300):
        update(f"kind {number}")
    update("tool_call_update", content="x" * 5_000_000)
    update("tool_call_update", content=[{}] * 40_000)
    assert ask_client({"mine": 1}, "fs/read_text_file", path="/etc/passwd")["error"]["code"] == -32601
    nothing = ask_client(1, "session/request_permission", options=[5, {"kind": 5, "optionId": 5}])
    assert nothing["result"]["outcome"] == {"outcome": "selected", "optionId": 5}, nothing


def prompt(number, params, messages):
    if "noise" in MODES:
        noise()
    if "dies-second" in MODES and messages:
        os._exit(5)
    messages.append({"role": "user", "content": params["prompt"][0]["text"]})
    while True:
        try:
            message = ask_model(messages)
        except OSError as error:
            send(id=number, error={"code": -32603, "message": str(error)})
            return
        if "dies-later" in MODES:
            os.write(2, b"died of it\n")
            os._exit(4)
        messages.append(message)
        update("agent_message_chunk", content={"type": "text", "text": message.get("content") or ""})
        if "huge" in MODES:
            sys.stdout.write("x" * (17 << 20))
            sys.stdout.flush()
        if not message.get("tool_calls"):
            break
        messages.extend(bash(call) for call in message["tool_calls"])
        if cancelled.is_set() or "stops" in MODES:
            break
    with open(FOLDER + "/session.json", "w") as kept:
        json.dump(messages, kept)
    if cancelled.is_set():
        with open("cancelled", "w") as file:
            file.write("yes")
    reason = next((mode[5:] for mode in MODES if mode.startswith("says-")), "end_turn")
    if "errs" in MODES:
        send(id=number, error={"code": -32603, "message": "an error of mine"})
    else:
        send(id=number, result={"stopReason": "cancelled" if cancelled.is_set() else reason})


def main():
    if "dies-first" in MODES:
        sys.exit("no settings")
    messages = []
    if "asks-first" in MODES:
        ask_model([{"role": "user", "content": "Write done."}])
    for line in sys.stdin:
        message = json.loads(line)
        method, number, params = message.get("method"), message.get("id"), message.get("params")
        if "hangs" in MODES:
            continue
        if method == "initialize":
            assert params["protocolVersion"] == 1
            assert params["clientCapabilities"] == {
                "fs": {"readTextFile": False, "writeTextFile": False},
                "terminal": False,
            }
            version = 7 if "old" in MODES else 1
            able = {"loadSession": "loads" in MODES, "mcpCapabilities": {"http": "mcp" in MODES}}
            about = {"name": "small", "version": "0.1"}
            ways = [{"id": "key", "name": "by key"}] if "locked" in MODES else []
            told = {"agentCapabilities": able, "agentInfo": about, "authMethods": ways}
            send(id=number, result={"protocolVersion": version, **told})
        elif method == "authenticate":
            MODES.remove("locked")
            send(id=number, result=None)
        elif method == "session/new" and "locked" in MODES:
            send(id=number, error={"code": -32000, "message": "Authentication required"})
        elif method == "session/new" and "errs-first" in MODES:
            send(id=number, error="no")
        elif method == "session/new":
            assert params["cwd"] == os.getcwd() and params.keys() == {"cwd", "mcpServers"}, params
            assert [ask_server(server) for server in params["mcpServers"]] == (["t"] if "mcp" in MODES else []), params
            send(id=number, result={"sessionId": "s"})
        elif method == "session/load":
            with open(FOLDER + "/session.json") as kept:
                messages.extend(json.load(kept))
            for said in messages:
                update("user_message_chunk", content=said)
            send(id=number, result=None)
        elif method == "session/prompt":
            assert params["sessionId"] == "s"
            threading.Thread(target=prompt, args=(number, params, messages), daemon=True).start()
        elif method == "session/cancel":
            cancelled.set()
        else:
            answers.put(message)


if __name__ == "__main__":
    main()
