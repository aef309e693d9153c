"""A program: an agent of hermes-agent's whose user interrupts it while a command runs, and then goes on.

Its argument is the base URL of a scripted model, whose first command leaves `begun` and waits. Prints what came of it,
as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any


def outputs(messages: list[dict[str, Any]]) -> list[Any]:
    """What the model was told of each of its calls."""
    return [message["content"] for message in messages if message["role"] == "tool"]


def main() -> None:
    from model_tools import handle_function_call
    from run_agent import AIAgent

    given = {"base_url": sys.argv[1], "api_key": "none", "model": "scripted", "provider": "custom"}
    agent = AIAgent(**given, enabled_toolsets=["terminal"], quiet_mode=True, skip_memory=True)
    turns: list[dict[str, Any]] = []
    talk = threading.Thread(target=lambda: turns.append(agent.run_conversation("Wait", task_id="chat")))
    talk.start()
    look = {"command": "cat begun"}
    while "yes" not in handle_function_call("terminal", look, task_id="chat", session_id="chat"):
        time.sleep(0.1)
    began = time.monotonic()
    agent.interrupt()
    talk.join()
    seconds = time.monotonic() - began
    told = turns[0]["messages"]
    again = agent.run_conversation("Go on", task_id="chat", conversation_history=told)["messages"]
    agent.close()
    found = {"interrupted": turns[0]["interrupted"], "seconds": seconds, "told": outputs(told), "again": outputs(again)}
    sys.__stdout__.write(json.dumps(found))


if __name__ == "__main__":
    main()
