"""Serves an engine over HTTP as vLLM and SGLang do for trainers: token ids in, sampled token ids and logprobs out.

Both formats are told apart by the body of `POST /generate`:

- vLLM's, as the API server of Atropos' example trainer has it: `{"prompt": {"prompt_token_ids": […]}, "logprobs": 0,
  "n": …, "max_tokens": …, "temperature": …}`, answered by `logprobs[completion][place] = [{"token id": logprob}]`;
- SGLang's native one: `{"input_ids": […], "sampling_params": {…}, "return_logprob": true}`, answered by
  `meta_info.output_token_logprobs = [[logprob, token id, text or null], …]`.

What would change the distribution that is sampled from (`top_p`, penalties, `stop` strings, …) is refused unless it is
neutral: the logprobs would no longer be those of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hermes_core.errors import UsageError
from hermes_core.testing.tiny_model.engine import Engine, Sampled

MAX_REQUEST_BYTES = 64 << 20


class _Sampling(BaseModel):
    """What both formats know, and only what leaves the distribution as it is."""

    model_config = ConfigDict(extra="forbid")

    n: int = Field(default=1, ge=1, le=256)
    temperature: float = Field(default=1.0, ge=0)
    top_p: Literal[1] = 1
    top_k: Literal[-1, 0] = -1
    min_p: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    stop: tuple[()] | None = None
    skip_special_tokens: bool = True


class _Ids(BaseModel):
    prompt_token_ids: list[int]


class VllmRequest(_Sampling):
    """`POST /generate` as vLLM has it. `max_tokens` has vLLM's own default."""

    prompt: _Ids
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: Literal[0] | None = None
    stream: Literal[False] = False


class SglangSampling(_Sampling):
    """SGLang's `sampling_params`. `max_new_tokens` has SGLang's own default."""

    max_new_tokens: int | None = Field(default=128, ge=1)


class SglangRequest(BaseModel):
    """`POST /generate` as SGLang has it."""

    model_config = ConfigDict(extra="forbid")

    input_ids: list[int]
    sampling_params: SglangSampling = Field(default_factory=SglangSampling)
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    stream: Literal[False] = False


class TinyModelServer:
    """`async with TinyModelServer(engine, tokenizer) as server: … server.base_url …`. The engine stays its owner's.

    Args:
        engine: what samples; it runs in its own thread, so this server's event loop never waits for it.
        tokenizer: for the texts beside the tokens.
        port: where to listen on the loopback interface; 0 is any free port.
    """

    def __init__(self, engine: Engine, tokenizer: Any, *, port: int = 0) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.base_url = ""
        """Where it listens, ending in `/v1` as `server_type: vllm` and `sglang` want it; set once it does."""
        self._port = port
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> TinyModelServer:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
        async with contextlib.AsyncExitStack() as opening:
            opening.push_async_callback(runner.cleanup)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            self._open = opening.pop_all()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, and end every connection."""
        await self._open.aclose()

    async def _health(self, request: Any) -> Any:
        from aiohttp import web

        return web.Response()

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise UsageError("the request is no JSON object")
            return web.json_response(await (self._sglang(body) if "input_ids" in body else self._vllm(body)))
        except (ValidationError, UsageError, ValueError) as error:
            return web.json_response({"error": {"message": str(error), "type": "BadRequestError"}}, status=400)
        except queue.Full:
            return web.json_response({"error": {"message": "too many requests wait"}}, status=503)

    async def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = VllmRequest.model_validate(body)
        ids = asked.prompt.prompt_token_ids
        done = await self._complete(ids, asked, asked.max_tokens)
        answer: dict[str, Any] = {
            "text": [self._text(each) for each in done],
            "prompt": self.tokenizer.decode(ids),
            "finish_reasons": [each.finish_reason for each in done],
        }
        if asked.logprobs is not None:
            answer["logprobs"] = [
                [[{str(token): logprob}] for token, logprob in zip(each.tokens, each.logprobs, strict=True)]
                for each in done
            ]
            answer["prompt_token_ids"] = ids
            answer["token_ids"] = [each.tokens for each in done]
        return answer

    async def _sglang(self, body: dict[str, Any]) -> Any:
        asked = SglangRequest.model_validate(body)
        done = await self._complete(asked.input_ids, asked.sampling_params, asked.sampling_params.max_new_tokens)
        answers = [self._sglang_answer(asked, each) for each in done]
        return answers if asked.sampling_params.n > 1 else answers[0]

    def _sglang_answer(self, asked: SglangRequest, done: Sampled) -> dict[str, Any]:
        stopped = done.finish_reason == "stop"
        ended = (
            {"type": "stop", "matched": done.tokens[-1]} if stopped else {"type": "length", "length": len(done.tokens)}
        )
        meta: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": ended,
            "prompt_tokens": len(done.prompt),
            "completion_tokens": len(done.tokens),
        }
        if asked.return_logprob:
            texts = (
                self.tokenizer.batch_decode(done.tokens) if asked.return_text_in_logprobs else [None] * len(done.tokens)
            )
            meta["output_token_logprobs"] = [list(each) for each in zip(done.logprobs, done.tokens, texts, strict=True)]
        return {"text": self._text(done), "output_ids": done.tokens, "meta_info": meta}

    async def _complete(self, ids: list[int], asked: _Sampling, max_tokens: int | None) -> Sequence[Sampled]:
        """The completions that were asked for. If the caller goes away, those that still wait are not made."""
        room = max_tokens if max_tokens is not None else self.engine.context - len(ids)
        waiting = [
            asyncio.wrap_future(self.engine.submit(ids, max_tokens=room, temperature=asked.temperature))
            for _ in range(asked.n)
        ]
        return await asyncio.gather(*waiting)

    def _text(self, done: Sampled) -> str:
        text: str = self.tokenizer.decode(done.tokens, skip_special_tokens=True)
        return text
