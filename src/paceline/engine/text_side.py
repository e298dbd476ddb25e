"""From token events to text: detokenising, stop strings, and the deltas that callers see."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.engine.intake import Intake
from paceline.engine.model_info import ModelInfo
from paceline.engine.outputs import ChoiceDelta
from paceline.text.stop_strings import StopStrings
from paceline.text.tokenizer import Tokenizer
from paceline.types import FinishReason, TokenEvent, TokenLogprobs, TokenRules


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """A delta, and what is known of its request by now. ``last`` marks the last delta of the last choice."""

    request_id: str
    delta: ChoiceDelta
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None
    last: bool


class TextSide:
    """Follows the running requests. ``abort`` is told of sequences whose text has ended before their tokens did."""

    def __init__(self, info: ModelInfo, abort: Callable[[str], object]) -> None:
        self._tokenizer = info.tokenizer
        self._abort = abort
        self._choices: dict[str, _Choice] = {}
        self._open: dict[str, set[str]] = {}

    def add(self, intake: Intake) -> None:
        self._open[intake.request_id] = {request.request_id for request in intake.requests}
        for index, request in enumerate(intake.requests):
            self._choices[request.request_id] = _Choice(index, intake, self._tokenizer, request.rules)

    def open_choices(self, request_id: str) -> list[str]:
        """Ids of the sequences of a request that have not ended."""
        return sorted(self._open.get(request_id, ()))

    def update(self, events: Iterable[TokenEvent]) -> list[RequestUpdate]:
        """The deltas that a step's events lead to. Events of sequences whose text has ended are dropped."""
        updates = []
        for event in events:
            choice = self._choices.get(event.request_id)
            if choice is None:
                continue
            delta = choice.update(event)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._close(choice.request_id, event.request_id)
                if event.finish_reason is None:
                    self._abort(event.request_id)
            updates.append(self._wrap(choice, delta))
        return updates

    def drop(self, choice_id: str) -> None:
        """Stop following a sequence, and have it aborted."""
        self._close(self._choices[choice_id].request_id, choice_id)
        self._abort(choice_id)

    def fail_all(self, message: str) -> list[RequestUpdate]:
        """End everything with an error: for an engine that cannot go on."""
        return self.update(
            [
                TokenEvent(choice_id, finish_reason=FinishReason.ERROR, error=message)
                for choice_id in list(self._choices)
            ]
        )

    def _close(self, request_id: str, choice_id: str) -> None:
        del self._choices[choice_id]
        self._open[request_id].discard(choice_id)
        if not self._open[request_id]:
            del self._open[request_id]

    def _wrap(self, choice: _Choice, delta: ChoiceDelta) -> RequestUpdate:
        last = delta.finish_reason is not None and choice.request_id not in self._open
        return RequestUpdate(choice.request_id, delta, choice.num_cached_tokens, choice.prompt_logprobs, last)


class _Choice:
    """One choice's text: what has been said, and the tokens whose text is still held back."""

    def __init__(self, index: int, intake: Intake, tokenizer: Tokenizer, rules: TokenRules) -> None:
        params = intake.params
        self.request_id = intake.request_id
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._index = index
        self._tokenizer = tokenizer
        self._stop_names = intake.stop_names
        self._end_tokens = frozenset(rules.eos_token_ids + rules.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._show_stop = params.include_stop_str_in_output
        self._detokenizer = tokenizer.detokenizer(
            skip_special=params.skip_special_tokens,
            prompt_tail=intake.prompt_token_ids[-8:],
            shown=intake.shown_ids,
        )
        self._stops = StopStrings(intake.stop_strings, include=params.include_stop_str_in_output)
        self._num_tokens = 0
        self._decoded = 0
        self._released = 0
        # (token, its log-probabilities, characters decoded once it was added), oldest first.
        self._held: deque[tuple[int, TokenLogprobs | None, int]] = deque()

    def update(self, event: TokenEvent) -> ChoiceDelta | None:
        """Take a step's news; None if there is nothing to tell yet."""
        if event.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += event.prompt_logprobs
        text = ""
        for position, token in enumerate(event.token_ids):
            self._num_tokens += 1
            # A grammar or an early stop may end the output after an ordinary token, too.
            ends_here = (
                event.finish_reason is FinishReason.STOP
                and position == len(event.token_ids) - 1
                and token in self._end_tokens
            )
            # A stop token adds no text, unless the caller wants to see what ended the output.
            piece = "" if ends_here and not self._show_stop else self._detokenizer.push([token])
            self._decoded += len(piece)
            logprobs = event.logprobs[position] if event.logprobs else None
            self._held.append((token, logprobs, self._decoded + self._detokenizer.holds_back))
            text += self._stops.push(piece, counts=self._num_tokens > self._min_tokens)
            if self._stops.matched is not None:
                return self._delta(text, FinishReason.STOP, self._stops.matched)
        if event.finish_reason is None:
            return self._delta(text) if text else None
        text += self._stops.push(self._detokenizer.finish(), counts=self._num_tokens > self._min_tokens)
        if self._stops.matched is not None and event.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            return self._delta(text, FinishReason.STOP, self._stops.matched)
        text += self._stops.finish()
        reason: int | str | None = event.stop_reason
        if isinstance(event.stop_reason, int):
            reason = self._stop_names.get(event.stop_reason, event.stop_reason)
        return self._delta(text, event.finish_reason, reason, event.error)

    def _delta(
        self,
        text: str,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> ChoiceDelta:
        self._released += len(text)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while self._held and (finish_reason is not None or self._held[0][2] <= self._released):
            token, entry, _ = self._held.popleft()
            tokens.append(token)
            if entry is not None:
                logprobs.append(entry)
        return ChoiceDelta(self._index, text, tuple(tokens), tuple(logprobs), finish_reason, stop_reason, error)
