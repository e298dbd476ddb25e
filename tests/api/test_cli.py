from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from paceline import __version__
from paceline.api.cli.flags import attribute_docs, dashed, engine_config, memory_size
from paceline.api.cli.main import build_parser, main
from paceline.config import EngineConfig

HEAVY = {"numpy", "fastapi", "uvicorn", "tokenizers", "jinja2", "tqdm", "huggingface_hub"}


def paceline(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *args], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["serve", "--help"], ["run", "--help"]])
def test_help_and_version_load_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\nfrom paceline.api.cli.main import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_every_setting_has_a_flag_and_an_explanation() -> None:
    names = {field.name for field in fields(EngineConfig)}
    assert attribute_docs(EngineConfig).keys() == names
    args = build_parser().parse_args(["serve", "some/model"])
    assert engine_config(args) == EngineConfig("some/model")


def test_flags_take_dashes_and_underscores() -> None:
    parse = build_parser().parse_args
    dashes = parse(["serve", "m", "--max-model-len", "64", "--no-enable-prefix-caching", "--kv-cache-memory=1GiB"])
    underscores = parse(["serve", "m", "--max_model_len=64", "--no_enable_prefix_caching", "--kv_cache_memory", "1GiB"])
    assert engine_config(dashes) == engine_config(underscores)
    assert engine_config(dashes).kv_cache_memory == 2**30
    assert not engine_config(dashes).enable_prefix_caching


def test_adapters_are_given_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    parse = build_parser().parse_args
    args = parse(["serve", "m", "--lora", "a_b=some/pa_th", "--lora=c=d=e"])
    assert engine_config(args).lora == {"a_b": "some/pa_th", "c": "d=e"}
    for wrong, message in (("a", "expected NAME=PATH, not 'a'"), ("=x", "expected"), ("a=", "expected")):
        with pytest.raises(SystemExit):
            parse(["serve", "m", "--lora", wrong])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["serve", "m", "--lora", "a=x", "--lora", "a=y"])
    assert "there are two adapters of the name 'a'" in capsys.readouterr().err


def test_only_names_of_flags_are_respelt() -> None:
    assert dashed("--a_b=c_d") == "--a-b=c_d"
    assert [dashed(word) for word in ("a_b", "-a_b", "--", "---_")] == ["a_b", "-a_b", "--", "---_"]


def test_an_unknown_flag_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--max-modellen", "5"])
    assert end.value.code == 2
    assert "did you mean --max-model-len?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5), ("1k", 1000), ("2KiB", 2048), ("1.5 GiB", 3 * 2**29), ("512mb", 512 * 10**6)]
)
def test_sizes_may_have_units(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1 parsec", "1e9", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        memory_size(text)


def test_a_missing_model_is_a_message_and_not_a_traceback(tmp_path: Path) -> None:
    for command in ("run", "inspect", "pull", "serve"):
        args = [command, str(tmp_path / "nothing.gguf"), *(["hi"] if command == "run" else [])]
        done = paceline(*args)
        assert done.returncode == 1, (command, done)
        assert "nothing.gguf" in done.stderr
        assert "Traceback" not in done.stderr


def test_settings_out_of_range_are_a_message(tmp_path: Path) -> None:
    done = paceline("serve", str(tmp_path), "--max-num-seqs", "0")
    assert (done.returncode, done.stderr) == (1, "paceline: max_num_seqs must be from 1 to 65536, not 0\n")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: paceline" in capsys.readouterr().out


def test_a_prompt_of_many_words_without_quotes_is_explained() -> None:
    done = paceline("run", "what", "is", "this")
    assert done.returncode == 1
    assert "put quotes around the prompt" in done.stderr


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
def test_a_lone_word_that_is_a_model_is_not_taken_for_a_prompt(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    done = paceline("run", str(tmp_path / name))
    assert (done.returncode, "there is no prompt" in done.stderr) == (1, True)
    assert name in paceline("run", str(tmp_path / name), stdin="hi").stderr


def test_an_empty_prompt_is_no_prompt() -> None:
    for done in (paceline("run", ""), paceline("run", stdin=" \n")):
        assert (done.returncode, "there is no prompt" in done.stderr) == (1, True)


@pytest.mark.real_model
def test_a_real_model_is_described(smollm2_path: Path) -> None:
    done = paceline("inspect", str(smollm2_path), "--tensors", "--template")
    assert done.returncode == 0, done.stderr
    for part in ("134,515,008", "Q4_1", "<|im_end|> (2)", "blk.0.attn_q.weight", "8192 tokens", "<|im_start|>"):
        assert part in done.stdout


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_answers(smollm2_path: Path) -> None:
    done = paceline("run", str(smollm2_path), "What is the capital of France?", "--max-tokens", "30")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    piped = paceline("run", "--max-tokens", "30", stdin="What is the capital of France?")
    assert piped.stdout == done.stdout


@pytest.mark.real_model
@pytest.mark.slow
def test_a_conversation_remembers(smollm2_path: Path) -> None:
    done = paceline("run", str(smollm2_path), "--chat", "--max-tokens", "12", stdin="My name is Ada.\nWho am I?\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> ") == 3
