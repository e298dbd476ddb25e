"""What the front of an engine needs to know of the model it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.sample.grammar import Grammars
from paceline.text.answer_formats import AnswerFormats
from paceline.text.thinking import ThinkingTags
from paceline.text.tokenizer import Tokenizer
from paceline.types import LogprobsMode

if TYPE_CHECKING:
    from paceline.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class ModelInfo:
    """Attributes:
    name: what the caller named the model.
    tokenizer, chat_template: the text side; a model without a template cannot chat.
    thinking: what opens and ends its thinking; None for a model that does not think.
    eos_token_ids: union of what tokenizer, config and generation config name as end of sequence.
    max_model_len: tokens of prompt and output together.
    max_logprobs: largest number of likeliest tokens a request may ask for; -1 is the vocabulary.
    logprobs_mode: what is reported as log-probabilities.
    max_cached_tokens: tokens that the key-value store holds.
    default_params: sampling defaults of the model's generation config, by their names in SamplingParams.
    formats: how the model writes thinking and tool calls.
    grammars: compiles what structured output asks for; the runner has its own.
    numerics: names everything that may change a bit of the results.
    adapters: folders of the adapters that requests may name, by their names.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    thinking: ThinkingTags | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_logprobs: int
    logprobs_mode: LogprobsMode
    max_cached_tokens: int
    default_params: Mapping[str, float | int]
    formats: AnswerFormats
    grammars: Grammars
    numerics: str
    adapters: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def max_prompt_bytes(self) -> int:
        """A longer text cannot fit the context: no token covers more bytes than the longest one."""
        longest = max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.vocab_size))
        return self.max_model_len * longest
