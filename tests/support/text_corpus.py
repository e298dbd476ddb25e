"""Texts on which tokenizers tend to differ."""

from __future__ import annotations

import random

TEXTS = [
    "",
    " ",
    "  ",
    "   a",
    "a  12",
    "a\n\n12  34\n 5",
    "Hello, world! How're you? I'LL say it's HE'S they've We'Re",
    "The year 2024 had 366 days; pi is 3.14159265358979, and 1,000,000 is a million.",
    "0123456789 ٠١٢٣٤ ०१२३ Ⅷ ½ ²",
    "def f(x):\n    if x > 0:\n\treturn {'a': [1, 2], \"b\": x**2}\n\n\n# end  \n",
    "for (int i = 0; i < n; ++i) { sum += a[i]; } // $x^2 ~ `y` | z\r\n\r\n",
    '<html>\n  <body class="x">&nbsp;</body>\n</html>',
    "https://example.org/a/b?c=d&e=%20f#g user@host.example ~/.config/x_y-z.toml",
    "你好，世界！今天天气怎么样？我们去公园吧。",
    "日本語のテキストとカタカナ、ひらがな。ｶﾀｶﾅ",
    "안녕하세요 세계 ㅋㅋㅋ",
    "Привет, мир! Ёлка. Ἑλλάδα, Γειά σου. ÜBER straße ÉCOLE façade",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    "नमस्ते दुनिया, สวัสดีชาวโลก, வணக்கம்",
    "emoji 😀👍🏽 👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 ❤️ end",
    "combining: é ạ̈ n̄ Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍ A̴̵̜̰͔ͫ͗͢ o̲",
    "tab\there\t\ttwo \t mixed \t\n line\rcarriage\r\nboth\n\r",
    "nbsp\u00a0here\u00a0\u00a0 thin\u2009space\u3000ideographic\u2028line\u2029para\u200bzero\u200dwidth\ufeffbom",
    "quotes “curly” ‘single’ «guillemets» — dash – en … ellipsis • bullet",
    "math ∑∫√∞ ≤≥≠ α→β ⟨x⟩ ℝ ℂ 𝔸𝕏 ①②",
    "!!!???...,,,;;;:::---___===+++***///\\\\\\|||",
    "a" * 200,
    "ab " * 70,
    "1" * 100,
    " " * 100 + "x",
    "\n" * 40 + "y",
    "\t" * 33 + "z",
    "=" * 80,
    "é" * 50,
    "😀" * 20,
    "中" * 60,
    "MiXeD CaSe WORDsAndCamelCase snake_case kebab-case SCREAMING_SNAKE",
    "don't DON'T 'tis 'Twas y'all o'clock rock'n'roll '' '''",
    "x" + "\u0301" * 30,
    "\x00\x01\x02\x7f control",
    "private \ue000 \U000f0000 use, unassigned \u0378, last \U0010ffff",
    "   leading and trailing   ",
    "one\n two\n  three\n   four\n\n\n\nfive",
    "Ünïcödé ñandú čeština žluťoučký kůň",
    "▁ lower ▁▁ block ▁a",
    "<0x41> <0x0A> [INST] <<SYS>> <s> </s> <unk>",
]


def random_texts(count: int, seed: int) -> list[str]:
    """Texts that mix characters of many kinds without sense."""
    draw = random.Random(seed)
    kinds = [
        *" \t\naB1é.,-_<|>中の한😀\u0301اя\u00a0$`½/{",
        *("  ", "23", "'s", "'LL", "\r\n", "the", " of", "ing", "}\n"),
    ]
    return ["".join(draw.choice(kinds) for _ in range(draw.randint(1, 40))) for _ in range(count)]
