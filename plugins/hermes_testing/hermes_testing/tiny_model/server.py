"""Serves an engine over HTTP as vLLM and SGLang do for trainers: token ids in, sampled token ids and logprobs out.

Four formats, two of which are told apart by the body of `POST /generate`:

- `atropos`: as the API server of Atropos' example trainer: `{"prompt": {"prompt_token_ids": […]}, "logprobs": 0,
  "n": …, "max_tokens": …, "temperature": …}`, answered by `logprobs[completion][place] = [{"token id": logprob}]`;
- `sglang`: SGLang's native format: `{"input_ids": […], "sampling_params": {…}, "return_logprob": true}`, answered by
  `meta_info.output_token_logprobs = [[logprob, token id, text or null], …]`;
- `tokens`: stock vLLM's `POST /inference/v1/generate`: `{"token_ids": […], "sampling_params": {…}}`, answered by
  `choices[…] = {"token_ids": […], "logprobs": {"content": [{"token": "token_id:7", "logprob": …}, …]}}`;
- `completions`: stock vLLM's `POST /v1/completions` with `return_token_ids`.

Stock vLLM and SGLang return the tokens of a text at `POST /tokenize`. At `GET /v1/models` they return their own name
and the maximum length of a conversation.

Anything that would change the sampled distribution (`top_p`, penalties, `stop` strings, …) is refused unless it is
neutral, because the logprobs would no longer be those of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hermes_core import UsageError
from hermes_testing.tiny_model.engine import Engine, SampledCompletion

MAX_REQUEST_BYTES = 64 << 20


class _Sampling(BaseModel):
    """The parameters that all formats have. Only values that leave the sampled distribution unchanged are accepted."""

    model_config = ConfigDict(extra="forbid")

    n: int = Field(default=1, ge=1, le=256)
    temperature: float = Field(default=1.0, ge=0)
    top_p: Literal[1] = 1
    top_k: Literal[-1, 0, 1] = -1
    min_p: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    stop: tuple[()] | None = None
    skip_special_tokens: bool = True


class _Ids(BaseModel):
    prompt_token_ids: list[int]


class CompletionsRequest(_Sampling):
    """`POST /v1/completions` as vLLM has it. `max_tokens` has OpenAI's default. `logprobs` may only ask for the sampled
    token's logprob."""

    model: str | None = None
    prompt: list[int]
    max_tokens: int | None = Field(default=16, ge=1)
    seed: int | None = None
    logprobs: Literal[0] | None = None
    return_token_ids: bool = False
    stream: Literal[False] = False


class TokensSampling(_Sampling):
    """vLLM's own sampling parameters. `logprobs` may only ask for the sampled token's logprob."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    logprobs: Literal[0, 1] | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion. Only tokens that end every completion are accepted."""
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)
    """The position from which a mixture of experts returns its routing. verifiers sends this to every model; this model
    has no experts."""


class TokensRequest(BaseModel):
    """`POST /inference/v1/generate` as vLLM has it."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    token_ids: list[int]
    sampling_params: TokensSampling
    stream: Literal[False] = False


class TokenizeRequest(BaseModel):
    """`POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class VllmRequest(_Sampling):
    """`POST /generate` as vLLM has it. `max_tokens` has vLLM's own default."""

    prompt: _Ids
    max_tokens: int | None = Field(default=16, ge=1)
    seed: int | None = None
    logprobs: Literal[0] | None = None
    stream: Literal[False] = False


class SglangSampling(_Sampling):
    """SGLang's `sampling_params`. `max_new_tokens` has SGLang's own default."""

    max_new_tokens: int | None = Field(default=128, ge=1)
    sampling_seed: int | None = None


class SglangRequest(BaseModel):
    """`POST /generate` as SGLang has it."""

    model_config = ConfigDict(extra="forbid")

    input_ids: list[int]
    sampling_params: SglangSampling = Field(default_factory=SglangSampling)
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    stream: Literal[False] = False


class TinyModelServer:
    """`async with TinyModelServer(engine, tokenizer) as server: … server.base_url …`. The caller still owns the engine.

    Args:
        engine: the sampler. It runs in its own thread, so this server's event loop never waits for it.
        tokenizer: the tokenizer that makes the texts beside the tokens.
        wires: the formats to serve.
        model: the model's name. A request with another name is refused, as by vLLM.
        port: the port to listen on, on the loopback interface; 0 means any free port.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        wires: Collection[str] = ("atropos", "sglang"),
        model: str = "tiny",
        port: int = 0,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.base_url = ""
        """The server's URL, ending in `/v1` as `server_type: vllm` and `sglang` need it; set once it listens."""
        self._model = model
        self._port = port
        stock = {
            "tokens": ("/inference/v1/generate", self._tokens),
            "completions": ("/v1/completions", self._completions),
        }
        self._paths = {path: answer for name, (path, answer) in stock.items() if name in wires}
        if {"atropos", "sglang"} & set(wires):
            self._paths["/generate"] = self._either
        self._kind: str | None = None  # the server's kind, as `/v1/models` reports it
        if set(wires) - {"atropos"}:
            self._paths["/tokenize"] = self._tokenize
            self._kind = "vllm" if stock.keys() & set(wires) else "sglang"
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> TinyModelServer:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/health", self._health)
        if self._kind is not None:
            app.router.add_get("/v1/models", self._models)
        for path, answer in self._paths.items():
            app.router.add_post(path, partial(self._answer, answer))
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

    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        card = {"id": self._model, "object": "model", "owned_by": self._kind, "max_model_len": self.engine.context}
        return web.json_response({"object": "list", "data": [card]})

    async def _answer(self, answer: Callable[[dict[str, Any]], Awaitable[Any]], request: Any) -> Any:
        from aiohttp import web

        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise UsageError("the request is not a JSON object")
            if body.get("model", self._model) != self._model:
                said = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
                return web.json_response({"error": said}, status=404)
            return web.json_response(await answer(body))
        except (ValidationError, UsageError, ValueError) as error:
            return web.json_response({"error": {"message": str(error), "type": "BadRequestError"}}, status=400)
        except queue.Full:
            return web.json_response({"error": {"message": "too many requests wait"}}, status=503)

    async def _either(self, body: dict[str, Any]) -> Any:
        return await (self._sglang(body) if "input_ids" in body else self._vllm(body))

    async def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = TokenizeRequest.model_validate(body)
        tokens = self.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.context}

    async def _tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = TokensRequest.model_validate(body)
        sampling = asked.sampling_params
        if others := set(sampling.stop_token_ids) - self.engine.stop:
            raise UsageError(f"the tokens {sorted(others)} do not end a completion here")
        done = await self._complete(asked.token_ids, sampling, sampling.max_tokens, sampling.seed)
        choices = []
        for index, each in enumerate(done):
            named = [(f"token_id:{token}", logprob) for token, logprob in zip(each.tokens, each.logprobs, strict=True)]
            content: list[dict[str, Any]] = [
                {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []} for token, logprob in named
            ]
            logprobs = {"content": content} if sampling.logprobs is not None else None
            choice = {"index": index, "logprobs": logprobs, "finish_reason": each.finish_reason}
            choices.append({**choice, "token_ids": each.tokens})
        return {"request_id": uuid.uuid4().hex, "choices": choices, "prompt_logprobs": None, "kv_transfer_params": None}

    async def _completions(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = CompletionsRequest.model_validate(body)
        done = await self._complete(asked.prompt, asked, asked.max_tokens, asked.seed)
        choices = [self._choice(asked, index, each) for index, each in enumerate(done)]
        written = sum(len(each.tokens) for each in done)
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": written}
        about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "model": self._model}
        return {**about, "choices": choices, "usage": {**usage, "total_tokens": len(asked.prompt) + written}}

    def _choice(self, asked: CompletionsRequest, index: int, done: SampledCompletion) -> dict[str, Any]:
        stopped = done.finish_reason == "stop"
        choice: dict[str, Any] = {
            "index": index,
            "text": self._text(done),
            "logprobs": None,
            "finish_reason": done.finish_reason,
            "stop_reason": done.tokens[-1] if stopped and done.tokens[-1] != self.tokenizer.eos_token_id else None,
            "token_ids": done.tokens if asked.return_token_ids else None,
            "prompt_token_ids": asked.prompt if asked.return_token_ids else None,
        }
        if asked.logprobs is not None:
            texts = self.tokenizer.batch_decode([[token] for token in done.tokens])
            top = [{text: logprob} for text, logprob in zip(texts, done.logprobs, strict=True)]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": done.logprobs,
                "top_logprobs": top,
                "text_offset": [],
            }
        return choice

    async def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = VllmRequest.model_validate(body)
        ids = asked.prompt.prompt_token_ids
        done = await self._complete(ids, asked, asked.max_tokens, asked.seed)
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
        sampling = asked.sampling_params
        done = await self._complete(asked.input_ids, sampling, sampling.max_new_tokens, sampling.sampling_seed)
        answers = [self._sglang_answer(asked, each) for each in done]
        return answers if asked.sampling_params.n > 1 else answers[0]

    def _sglang_answer(self, asked: SglangRequest, done: SampledCompletion) -> dict[str, Any]:
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

    async def _complete(
        self, ids: list[int], asked: _Sampling, max_tokens: int | None, seed: int | None
    ) -> Sequence[SampledCompletion]:
        """Return the requested completions. If the caller disconnects, completions that still wait are not made."""
        room = max_tokens if max_tokens is not None else self.engine.context - len(ids)
        one = asked.top_k == 1
        temperature = 0.0 if one else asked.temperature
        waiting = [
            asyncio.wrap_future(self.engine.submit(ids, max_tokens=room, temperature=temperature, seed=seed))
            for _ in range(asked.n)
        ]
        done = await asyncio.gather(*waiting)
        if one and not self.engine.raw_logprobs:  # a single token has all the remaining probability
            return [dataclasses.replace(each, logprobs=(0.0,) * len(each.logprobs)) for each in done]
        return done

    def _text(self, done: SampledCompletion) -> str:
        text: str = self.tokenizer.decode(done.tokens, skip_special_tokens=True)
        return text
