"""A tokenizer of single bytes, a chat template, and an engine around a random model: text in, text out, no files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paceline.core.kv_manager import KvManager
from paceline.core.scheduler import Scheduler, SchedulerLimits
from paceline.engine.engine import Engine, Runner
from paceline.engine.load import LoadedEngine, grammar_vocabulary
from paceline.engine.model_info import ModelInfo
from paceline.ops.reference import ReferenceOps
from paceline.runner.runner import ModelRunner
from paceline.sample.grammar import Grammars
from paceline.text.answer_formats import ReasoningFormat, ToolFormat, answer_formats
from paceline.text.chat_template import ChatTemplate
from paceline.text.parts import TokenCoding, TokenizerParts
from paceline.text.token_bytes import byte_level_alphabet
from paceline.text.tokenizer import Tokenizer
from paceline.types import LogprobsMode
from support.random_model import CONTEXT, random_adapters, random_model

EOS, START, END = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Id i < 256 is byte i; 256 ends a text, 257 and 258 are control tokens around a message."""
    vocab = {character: byte for byte, character in enumerate(byte_level_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<eos>", "<start>", "<end>")])
    return Tokenizer(
        TokenizerParts(
            backend, TokenCoding.BYTE_LEVEL, strips_space=False, vocab_size=259, bos_id=None, eos_ids=(EOS,),
            unk_id=None, prefix=(), suffix=(),
        )
    )  # fmt: skip


def small_engine(
    runner: Runner | None = None,
    *,
    num_blocks: int = 64,
    template: str = TEMPLATE,
    reasoning: ReasoningFormat | None = None,
    tools: ToolFormat | None = None,
    adapters: bool = False,
    **settings: Any,
) -> LoadedEngine:
    """An engine around ``runner``, or around a random model of the tokenizer's vocabulary.

    With ``adapters`` the model has those of :func:`~support.random_model.random_adapters`.
    """
    tokenizer = byte_tokenizer()
    limits = SchedulerLimits(**{
        "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": CONTEXT, **settings
    })  # fmt: skip
    grammars = Grammars(lambda: grammar_vocabulary(tokenizer))
    if runner is None:
        ops = ReferenceOps()
        model = replace(random_model(ops, vocab_size=264), adapters=random_adapters(ops) if adapters else {})
        runner = ModelRunner(
            model,
            ops,
            ops.make_kv(model.kv_layout, num_blocks, 8),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=CONTEXT,
            vocab_size=tokenizer.vocab_size,
            grammars=grammars,
        )
    info = ModelInfo(
        name="small",
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template),
        thinking=None,
        eos_token_ids=(EOS,),
        max_model_len=limits.max_model_len,
        max_logprobs=20,
        logprobs_mode=LogprobsMode.RAW_LOGPROBS,
        max_cached_tokens=num_blocks * 8,
        default_params={},
        formats=answer_formats(reasoning, tools, tokenizer),
        grammars=grammars,
        numerics="small",
        adapters={name: f"adapters/{name}" for name in ("wide", "few")} if adapters else {},
    )
    return LoadedEngine(Engine(Scheduler(limits, KvManager(num_blocks, 8)), runner), info)
