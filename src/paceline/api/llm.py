"""The offline API: a model in this process, prompts in, results out."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from paceline.config import EngineConfig
from paceline.engine.intake import Intake, accept
from paceline.engine.load import LoadedEngine, load_engine
from paceline.engine.outputs import ChoiceDelta, CompletionOutput, RequestOutput
from paceline.engine.prompts import encode_chat, encode_prompt, thinking_after
from paceline.engine.text_side import RequestUpdate, TextSide
from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams
from paceline.text.answer_parser import Thinking
from paceline.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = list[dict[str, Any]]
AdapterName = str | None


class LLM:
    """A model, loaded into this process.

    >>> with LLM("smollm2-135m-instruct") as llm:                                   # doctest: +SKIP
    ...     print(llm.chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text)

    The keyword arguments are the fields of :class:`~paceline.config.EngineConfig`; ``target_step_ms`` is off unless
    given, as nobody waits for single steps here. Use it as a context manager, or call
    :meth:`close`, to give its memory back at once. Several threads may share it; their requests run together.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        config = EngineConfig(model, **{"target_step_ms": None, **engine_args})
        self._connect(load_engine(config), config.seed)

    @classmethod
    def from_engine(cls, loaded: LoadedEngine, *, seed: int | None = None) -> LLM:
        """The same around an engine that was put together by hand."""
        llm = cls.__new__(cls)
        llm._connect(loaded, seed)
        return llm

    def _connect(self, loaded: LoadedEngine, seed: int | None) -> None:
        self._loaded: LoadedEngine | None = loaded
        self._text = TextSide(loaded.info, loaded.engine.abort)
        self._lock = threading.RLock()
        self._inboxes: dict[str, deque[RequestUpdate]] = {}
        self._seeds = random.Random(seed)
        self._num_submitted = 0

    # ---- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: AdapterName | Sequence[AdapterName] = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue raw prompts.

        A prompt is a string, a list of token ids, or ``{"prompt": str}`` / ``{"prompt_token_ids": [...]}``.

        Args:
            prompts: one or a list.
            sampling_params: one for all prompts, or one for each; None takes the model's defaults.
            lora_request: name of the adapter for all prompts, or one for each; None is the model itself.
            use_tqdm: show a progress bar, if standard error is a terminal.

        Returns:
            One result for each prompt, in their order.

        Raises:
            RequestError: a prompt or a parameter cannot be served; then nothing has been generated.
            ValueError: the lists differ in length.
        """
        encoded = [self._encode(prompt) for prompt in _prompt_list(prompts)]
        texts, ids = [text for text, _ in encoded], [ids for _, ids in encoded]
        return self._run(texts, ids, sampling_params, lora_request, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: AdapterName | Sequence[AdapterName] = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template; else like :meth:`generate`.

        Without ``max_tokens`` of the caller's own the answer may take the rest of the context. Its text is as the model
        wrote it, thinking and calls included; structured output begins after the thinking.
        """
        info, conversations = self._open.info, _conversation_list(messages)
        ids = [
            encode_chat(
                info,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        thinking = [
            thinking_after(info, prompt, conversation if continue_final_message else None)
            for prompt, conversation in zip(ids, conversations, strict=True)
        ]
        params = sampling_params or replace(self.default_sampling_params(), max_tokens=None)
        return self._run([None] * len(ids), ids, params, lora_request, use_tqdm, thinking)

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: AdapterName = None,
    ) -> Generator[ChoiceDelta, None, None]:
        """Answer one prompt or conversation piece by piece. Closing the iterator early ends the work."""
        default, thinking = self.default_sampling_params(), Thinking.OFF
        if _is_list_of(prompt, Mapping):
            tokens = encode_chat(self._open.info, cast(Conversation, prompt))
            thinking = thinking_after(self._open.info, tokens)
            default = replace(default, max_tokens=None)
        else:
            _, tokens = self._encode(cast(Prompt, prompt))
        for update in self._serve([self._accept(tokens, sampling_params or default, thinking, lora_request)]):
            yield update.delta

    # ---- the rest

    def get_tokenizer(self) -> Tokenizer:
        return self._open.info.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend, where they say so."""
        return SamplingParams(**self._open.info.default_params)  # type: ignore[arg-type]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        with self._lock:
            self._open.engine.scheduler.reset_prefix_cache()

    @property
    def max_model_len(self) -> int:
        return self._open.info.max_model_len

    @property
    def numerics(self) -> str:
        """Names everything that may change a bit of the results: results with the same string can be compared."""
        return self._open.info.numerics

    def close(self) -> None:
        """Give back model, store and threads. Safe to repeat."""
        with self._lock:
            if self._loaded is not None:
                # The text side holds the engine by its abort; one that holds nothing takes its place.
                self._text = TextSide(self._loaded.info, lambda _: None)
                self._loaded = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    @property
    def _open(self) -> LoadedEngine:
        if self._loaded is None:
            raise RuntimeError("this LLM is closed")
        return self._loaded

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not set(prompt) <= {"prompt", "prompt_token_ids"}:
                raise RequestError(
                    f"a prompt is {{'prompt': text}} or {{'prompt_token_ids': ids}}, not a dict of {sorted(prompt)}",
                    "prompt",
                )
            prompt = next(iter(prompt.values()))
        if not isinstance(prompt, str | Sequence):
            raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}", "prompt")
        return (prompt if isinstance(prompt, str) else None), encode_prompt(self._open.info, prompt)

    def _accept(
        self, tokens: Sequence[int], params: SamplingParams, thinking: Thinking, adapter: AdapterName
    ) -> Intake:
        self._num_submitted += 1
        return accept(
            self._open.info,
            tokens,
            params,
            request_id=f"req-{self._num_submitted}",
            seed_source=self._seeds,
            thinking=thinking,
            adapter=adapter,
        )

    def _run(
        self,
        texts: list[str | None],
        ids: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: AdapterName | Sequence[AdapterName],
        use_tqdm: bool,
        thinking: Sequence[Thinking] | None = None,
    ) -> list[RequestOutput]:
        params = _params_list(sampling_params, self.default_sampling_params(), len(ids))
        starts = thinking or [Thinking.OFF] * len(ids)
        adapters = _adapter_list(lora_request, len(ids))
        intakes = [self._accept(*each) for each in zip(ids, params, starts, adapters, strict=True)]
        outputs = {intake.request_id: _empty_output(intake, text) for intake, text in zip(intakes, texts, strict=True)}
        with _progress_bar(len(intakes), use_tqdm and sys.stderr.isatty()) as advance:
            for update in self._serve(intakes):
                _extend(outputs[update.request_id], update)
                advance(update.last)
        return list(outputs.values())

    def _serve(self, intakes: Sequence[Intake]) -> Iterator[RequestUpdate]:
        """Run accepted requests to their end. Leaving early, also by an exception, ends what is still running.

        Several of these may be open at once, also in several threads: whoever needs news makes a step for everybody.
        """
        inbox: deque[RequestUpdate] = deque()
        unfinished = {intake.request_id for intake in intakes}
        try:
            with self._lock:
                for intake in intakes:
                    self._text.add(intake)
                    self._inboxes[intake.request_id] = inbox
                    for request in intake.requests:
                        self._open.engine.add(request)
            while unfinished:
                with self._lock:
                    if not inbox:
                        self._step()
                while inbox:
                    update = inbox.popleft()
                    if update.last:
                        unfinished.discard(update.request_id)
                    yield update
        finally:
            with self._lock:
                self._leave(intakes)

    def _step(self) -> None:
        """One step, its news handed to whom they concern. An interrupt ends all requests, and the next ones work."""
        engine = self._open.engine
        try:
            self._hand_out(self._text.update(engine.step()))
        except BaseException as error:
            self._hand_out(self._text.fail_all(f"interrupted: {type(error).__name__}"))
            engine.reset()
            raise

    def _hand_out(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if (inbox := self._inboxes.get(update.request_id)) is not None:
                inbox.append(update)

    def _leave(self, intakes: Sequence[Intake]) -> None:
        """End what still runs of these. The last to leave lets the engine give back what they held."""
        for intake in intakes:
            self._inboxes.pop(intake.request_id, None)
            for choice in self._text.open_choices(intake.request_id):
                self._text.drop(choice)
        while self._loaded is not None and not self._inboxes and self._loaded.engine.has_work:
            self._step()


@contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[Callable[[int], object]]:
    """A bar on standard error, if ``show``; gives the function that moves it forward."""
    if not show:
        yield lambda _: None
        return
    from tqdm import tqdm  # its import takes longer than a short answer

    with tqdm(total=total, desc="Processed prompts", unit="prompt") as bar:
        yield bar.update


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a list of one: a text, a dict, or a list of token ids."""
    if isinstance(prompts, str | Mapping) or _is_list_of(prompts, int):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts are one prompt or a list of them, not {type(prompts).__name__}", "prompt")
    return cast(Sequence[Prompt], prompts)


def _conversation_list(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    return cast(Sequence[Conversation], [messages] if _is_list_of(messages, Mapping) else messages)


def _is_list_of(items: object, kind: type) -> bool:
    return isinstance(items, Sequence) and len(items) > 0 and isinstance(items[0], kind)


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts, but {len(params)} sampling_params")
    return list(params)


def _adapter_list(names: AdapterName | Sequence[AdapterName], count: int) -> list[AdapterName]:
    if names is None or isinstance(names, str):
        return [names] * count
    if not isinstance(names, Sequence):
        raise RequestError(f"lora_request is the name of an adapter, not {type(names).__name__}", "lora_request")
    if len(names) != count:
        raise ValueError(f"there are {count} prompts, but {len(names)} lora_requests")
    return list(names)


def _empty_output(intake: Intake, text: str | None) -> RequestOutput:
    wants = intake.params.logprobs is not None
    return RequestOutput(
        intake.request_id,
        text,
        intake.prompt_token_ids,
        outputs=[
            CompletionOutput(i, cumulative_logprob=0.0 if wants else None, logprobs=[] if wants else None)
            for i in range(len(intake.requests))
        ],
    )


def _extend(output: RequestOutput, update: RequestUpdate) -> None:
    delta = update.delta
    choice = output.outputs[delta.index]
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    if choice.logprobs is not None and choice.cumulative_logprob is not None:
        choice.logprobs += delta.logprobs
        choice.cumulative_logprob += sum(entry.logprob for entry in delta.logprobs)
    if delta.finish_reason is not None:
        choice.finish_reason = delta.finish_reason.value
        choice.stop_reason = delta.stop_reason
        choice.error = delta.error
    output.num_cached_tokens = update.num_cached_tokens
    output.prompt_logprobs = update.prompt_logprobs
    output.finished = update.last
