"""Random JSON schemas whose values are short, so that a model without sense comes to their end."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "b2", "né", "the key", 'q"x', "z_"]
FORMATS = ["date", "time", "ipv4", "uuid"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    inner = _random(rng, 0)
    return {**_random(rng, 2), "$defs": {"inner": inner}}


def _random(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "number", "string", "pattern", "boolean", "null", "enum", "const", "format"]
    if depth:
        kinds += ["object", "object", "array", "tuple", "anyOf", "ref"]
    return _of_kind(rng.choice(kinds), rng, depth)


def _of_kind(kind: str, rng: random.Random, depth: int) -> dict[str, Any]:
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 3000)}
    if kind == "number":
        return {"type": "number", "minimum": 0, rng.choice(["maximum", "exclusiveMaximum"]): rng.choice([1, 2.5, 70])}
    if kind == "string":
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(x|yy)-\\d{1,3}$", '^[^\\s"]{1,3}$'])}
    if kind == "enum":
        return {"enum": rng.sample([1, "x", None, True, "longer text", {"k": [1]}, [], 2.5], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([{"a": 1}, "c", 7, [None, False]])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: _random(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 1)
        items = _random(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "tuple":
        return {
            "type": "array", "prefixItems": [_random(rng, depth - 1) for _ in range(2)], "items": False,
            "minItems": 2,
        }  # fmt: skip
    if kind == "anyOf":
        return {"anyOf": [_random(rng, depth - 1), _random(rng, depth - 1)]}
    if kind == "ref":
        return {"type": "array", "items": {"$ref": "#/$defs/inner"}, "maxItems": 2}
    return {"type": kind}
