"""Servers that do what they should not, written without any package: `odd_server.py HOW [ARGUMENT]`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

HOW = sys.argv[1]
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


def write(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def answer(request: dict, result: object) -> None:
    write({"jsonrpc": "2.0", "id": request["id"], "result": result})


def tool(name: str, schema: object = SCHEMA, **more: object) -> dict:
    return {"name": name, "description": "d", "inputSchema": schema, **more}


def nested(levels: int) -> dict:
    schema: dict = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


LISTS = {
    "many": lambda: [tool(f"t{n}") for n in range(10_000)],
    "hundreds": lambda: [{"name": f"t{n}", "inputSchema": {"type": "object"}} for n in range(3000)],
    "several": lambda: [tool(f"t{n}") for n in range(200)],
    "no-object": lambda: [tool("t", {"type": "string"})],
    "no-schema": lambda: [tool("t", {"type": "object", "properties": 7})],
    "elsewhere": lambda: [tool("t", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}})],
    "deep": lambda: [tool("t", nested(20))],
    "too-deep": lambda: [tool("t", nested(400))],
    "big": lambda: [tool("t", {**SCHEMA, "description": "x" * 100_000})],
    "twice": lambda: [tool("t"), tool("t")],
    "slow-schema": lambda: [tool("t", {"type": "object", "properties": {"text": {"pattern": "^(a+)+$"}}})],
    "deep-pattern": lambda: [
        tool("t", {"type": "object", "properties": {"text": {"pattern": "(" * 9999 + ")" * 9999}}})
    ],
    "odd-names": lambda: [tool("files.read/all"), tool("files.read_all"), tool("x" * 90), tool("x" * 91)],
}


def flood(line: str) -> None:
    while True:
        sys.stdout.write(line)


def call(request: dict) -> None:
    arguments = request["params"].get("arguments") or {}
    if HOW == "hang":
        time.sleep(3600)
    elif HOW == "die":
        sys.stderr.write("out of ideas\n")
        sys.exit(3)
    elif HOW == "junk-answer":
        answer(request, {"content": "no list"})
    elif HOW == "no-answer":
        write({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32603, "message": "broken inside"}})
    elif HOW == "invalid":
        write({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32602, "message": "text: is required"}})
    elif HOW == "flood-junk":
        flood("no message\n" * 1000)
    elif HOW == "flood-notes":
        flood(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x"}}) + "\n")
    elif HOW == "flood-pings":
        flood("".join(json.dumps({"jsonrpc": "2.0", "id": n, "method": "ping"}) + "\n" for n in range(1000)))
    elif HOW == "flood-answers":
        flood("".join(json.dumps({"jsonrpc": "2.0", "id": 9000 + n, "result": {}}) + "\n" for n in range(1000)))
    elif HOW == "endless-line":
        flood("x" * 100_000)
    elif HOW.endswith("many-parts"):
        count = 100_000 if HOW == "too-many-parts" else 20_000
        answer(request, {"content": [{"type": "text", "text": "y"}] * count})
    elif HOW in ("child", "daemon"):
        child = subprocess.Popen(["sleep", "3600"], start_new_session=HOW == "daemon")
        answer(request, {"content": [{"type": "text", "text": f"{os.getpid()} {child.pid}"}]})
    else:
        answer(request, {"content": [{"type": "text", "text": json.dumps(arguments)}], "structuredContent": {}})


def main() -> None:
    if HOW == "exits":
        sys.stderr.write("no licence\n")
        sys.exit(2)
    if HOW == "never-starts":
        time.sleep(3600)
    if HOW == "banner":
        print("Welcome to the server!")
        print()
    if HOW == "ignores-the-end":
        sys.stdin = open("/proc/self/fd/0", encoding="utf-8")  # noqa: SIM115 - it lives as long as the program
    for line in sys.stdin:
        request = json.loads(line)
        method = request.get("method")
        if method == "initialize":
            version = "1999-01-01" if HOW == "old" else request["params"]["protocolVersion"]
            capabilities = {} if HOW == "no-tools" else {"tools": {}}
            about = {"name": "odd", "version": "1"}
            answer(request, {"protocolVersion": version, "capabilities": capabilities, "serverInfo": about})
        elif method == "tools/list":
            tools = LISTS.get(HOW, lambda: [tool("t")])()
            answer(request, {"tools": tools, **({"nextCursor": "more"} if HOW == "endless-list" else {})})
        elif method == "tools/call":
            call(request)
    if HOW == "ignores-the-end":
        time.sleep(3600)


main()
