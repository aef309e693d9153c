"""A coding agent in sixty lines, of the standard library alone: it asks a model at OPENAI_BASE_URL, and has one tool.

It works wherever there is Python: hermes-rl rollout ENV --agent program --agent.command='python3 /path/agent.py'
"""

import json
import os
import subprocess
import sys
import urllib.request

SYSTEM = (
    "You work in a Linux system. Do the task with the tool `bash`, and check your work. Say what you did at the end."
)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command, and get its output and exit status.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
LONGEST = 10_000


def ask(messages):
    """Return the model's next message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [BASH]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def bash(call):
    """Run the command of a call, and return its tool message."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(
            ["sh", "-c", command],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        text = done.stdout.decode("utf-8", "replace")
        said = text[-LONGEST:] + f"\n[exit status {done.returncode}]"
    except Exception as error:  # the model's mistakes are for the model
        said = f"{type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": said}


def main():
    """Work on the task that standard input has, until the model calls no tool any more."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message.get("content"))
            return
        messages.extend(bash(call) for call in message["tool_calls"])


if __name__ == "__main__":
    main()
