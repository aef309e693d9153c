"""A program of a slot, of the standard library alone: it calls every tool of the MCP servers that it is given, asks its
model once, and writes down what it got."""

import json
import os
import sys
import urllib.request

ARGUMENTS = json.loads(sys.argv[1])


def ask(url, headers, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def asker(server):
    accept = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}

    def asked(method, **params):
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return ask(server["url"], {**server["headers"], **accept}, body)["result"]

    return asked


with open(os.environ["HERMES_MCP_FILE"]) as file:
    servers = json.load(file)["mcpServers"]
told = {}
for name, server in servers.items():
    asked = asker(server)
    for tool in asked("tools/list")["tools"]:
        if tool["name"] in ARGUMENTS:
            got = asked("tools/call", name=tool["name"], arguments=ARGUMENTS[tool["name"]])
            told[f"{name} {tool['name']}"] = [got["content"][0]["text"], got.get("isError", False)]
ask(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    {"model": "any", "messages": [{"role": "user", "content": sys.stdin.read()}]},
)
with open("out.json", "w") as out:
    json.dump({"servers": servers, "told": told, "key": os.environ["OPENAI_API_KEY"]}, out)
