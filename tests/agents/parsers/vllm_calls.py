"""Runs texts through vLLM's own parsers, under a Python that has vLLM: JSON on standard input and output.

In: `{"tools": […], "texts": [[PARSER, TEXT], …]}`.
Out, for each text: `{"calls": [[NAME, ARGUMENTS], …], "content": …}`, or `{"error": …}`.
"""

import json
import re
import sys
from types import SimpleNamespace


class Vocabulary(dict):
    """Knows every token but the absent ones, which is all that the parsers ask for."""

    def __init__(self, absent):
        super().__init__()
        self.absent = absent

    def get(self, token, default=None):
        return default if token in self.absent else self[token]

    def __contains__(self, token):
        return token not in self.absent

    def __missing__(self, token):
        return self.setdefault(token, len(self))


def tokenizer(text):
    """Return what the parsers ask of the tokenizer of a model that writes like this.

    vLLM tells by it how a model writes: Mistral's that write a list have no `[ARGS]`, and Hunyuan's name the suffix
    of their tags.
    """
    words = Vocabulary({"[ARGS]"} if re.search(r"\[TOOL_CALLS\]\s*\[", text) else set())
    return SimpleNamespace(
        init_kwargs={"token_suffix": ":opensource"} if ":opensource>" in text else {},
        get_vocab=lambda: words,
        vocab=words,
        convert_tokens_to_ids=lambda token: words[token],
        encode=lambda text, **_: [words[letter] for letter in text],
        all_special_tokens=[],
        all_special_ids=[],
    )


def parsed(name, text, tools):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    known = [ChatCompletionToolsParam(**tool) for tool in tools]
    parser = ToolParserManager.get_tool_parser(name)(tokenizer(text), known)
    asked = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest(model="m", messages=asked, tools=tools, tool_choice="auto")
    found = parser.extract_tool_calls(text, parser.adjust_request(request) or request)
    calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
    return {"calls": [(name, json.loads(arguments)) for name, arguments in calls], "content": found.content}


def main():
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM logs on standard output
    given, found = json.load(sys.stdin), []
    for name, text in given["texts"]:
        try:
            found.append(parsed(name, text, given["tools"]))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(found, out)


if __name__ == "__main__":
    main()
