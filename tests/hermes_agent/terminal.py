"""A program: one command of hermes-agent's. Prints what the model is told."""

import sys

from model_tools import handle_function_call

print(handle_function_call("terminal", {"command": sys.argv[1]}))
