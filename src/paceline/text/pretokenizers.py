"""How byte-level vocabularies cut a text into words before merging, by the names that GGUF files use.

A GGUF file holds vocabulary and merges, but only the name of its pre-tokenizer. The expressions are those of the
models' own ``tokenizer.json``; where GGUF readers are known to differ from these (letters with case, in ``tekken`` and
``gpt-4o``), the model's own wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"[0-9][0-9][0-9]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES_AND_BLANKS}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_LINES_AND_BLANKS}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_BLANKS}"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_BLANKS}"
_BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+"
)  # fmt: skip
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALLS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALLS}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALLS}*|"
    rf"\p{{N}}|{_SYMBOLS_AND_SLASHES}|{_LINES_AND_BLANKS}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALLS}+{_CONTRACTION}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALLS}*{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}|{_SYMBOLS_AND_SLASHES}|{_LINES_AND_BLANKS}"
)
_DEEPSEEK_CJK = "[一-\u9fa5\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_BLANKS}"
)
_FALCON_SYMBOLS = r"[\p{P}$+<=>^~|`]+"
_SENTENCE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Attributes:
    splits: expressions applied one after the other; each match becomes a piece of its own, and so does what lies
        between two matches.
    whole_words: a piece that is in the vocabulary is taken whole, without merging.
    adds_bos: raw prompts begin with the BOS token unless the file says otherwise.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_WITH_BOS = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_MARKS = PreTokenizer((_SENTENCE_MARKS,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "trillion": _PLAIN_GPT2,
    "gigachat": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "granite-docling": _PLAIN_GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "falcon": PreTokenizer((_FALCON_SYMBOLS, _GPT2, _THREE_DIGITS)),
    "llama-bpe": _LLAMA3_WITH_BOS,
    "llama3": _LLAMA3_WITH_BOS,
    "llama-v3": _LLAMA3_WITH_BOS,
    "falcon3": _LLAMA3_WITH_BOS,
    "falcon-h1": _LLAMA3_WITH_BOS,
    "pixtral": _LLAMA3_WITH_BOS,
    "lfm2": _LLAMA3_WITH_BOS,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "megrez": PreTokenizer((_QWEN2,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "hunyuan": PreTokenizer((_QWEN2,)),
    "grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe": PreTokenizer((_BAILING,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-\u9fa5\u0800-一\uac00-\ud7ff]+", _DIGIT)
    ),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK_CJK, _DEEPSEEK3)),
    "hunyuan-dense": PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK_CJK, _DEEPSEEK3)),
    "poro-chat": _MARKS,
    "bloom": _MARKS,
    "gpt3-finnish": _MARKS,
    "viking": PreTokenizer((_SENTENCE_MARKS, _DIGIT)),
}
