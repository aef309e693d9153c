"""The fixture `tokenizers`: small tokenizers with the chat templates of real models, made on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizers(exact_extra: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The tokenizer of a chat format; its folder is `name_or_path`."""
    from hermes_testing.tiny_model.folder import make_tokenizer
    from transformers import AutoTokenizer

    from hermes_core.runtime import Runtime
    from hermes_core.settings import Settings

    made: dict[str, Any] = {}
    tools = Runtime(Settings(), load_entry_points=False).tools
    schemas = tools.schemas(("terminal", "process", "read_file", "write_file", "patch", "search_files"))
    texts = [json.dumps(schemas), json.dumps(schemas, indent=4)]  # so that prompts are short, as in real models

    def of(form: str) -> Any:
        if form not in made:
            folder = tmp_path_factory.mktemp(form)
            make_tokenizer(folder, form, texts, vocabulary=3000)
            made[form] = AutoTokenizer.from_pretrained(str(folder))
        return made[form]

    return of
