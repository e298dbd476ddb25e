"""The Hub's library is replaced by a function: what it is asked for, and what becomes of its errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from paceline.checkpoint.fetch import resolve_model
from paceline.checkpoint.hub import FOLDER_EXCEPTIONS, FOLDER_PATTERNS
from paceline.errors import CheckpointError


class Hub:
    """Stands in for ``snapshot_download``: records its arguments, then raises or returns the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, repo_id: str, **arguments: Any) -> str:
        self.calls.append({"repo_id": repo_id, **arguments})
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "snapshot")
    hub.folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def resolve(name: str, tmp_path: Path, *, offline: bool = False, progress: bool = True) -> Path:
    return resolve_model(name, cache=tmp_path / "cache", offline=offline, progress=progress)


class UnheardOfError(Exception):
    """One that comes from the layers below the library."""


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} from the server", response=response)  # type: ignore[arg-type]


def test_a_name_asks_for_the_files_of_a_safetensors_folder(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "model.safetensors").touch()
    assert resolve("org/name-1.5_b", tmp_path) == hub.folder
    (call,) = hub.calls
    assert call["repo_id"] == "org/name-1.5_b"
    assert call["allow_patterns"] == FOLDER_PATTERNS
    assert call["ignore_patterns"] == FOLDER_EXCEPTIONS
    assert call["local_files_only"] is False
    assert call["tqdm_class"] is None


def test_the_patterns_take_what_a_model_needs_and_no_second_copy_of_it() -> None:
    needed = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "chat_template.jinja",
    ]  # fmt: skip
    others = [
        "README.md", "pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "model.gguf",
        "consolidated.safetensors", "flax_model.msgpack", "run.py",
    ]  # fmt: skip
    taken = huggingface_hub.utils.filter_repo_objects(
        needed + others, allow_patterns=FOLDER_PATTERNS, ignore_patterns=FOLDER_EXCEPTIONS
    )
    assert list(taken) == needed


def test_a_file_asks_for_that_file_alone(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "sub").mkdir()
    (hub.folder / "sub" / "model.Q4_K_M.gguf").touch()
    assert resolve("org/name:sub/model.Q4_K_M.gguf", tmp_path) == hub.folder / "sub" / "model.Q4_K_M.gguf"
    assert hub.calls[0]["allow_patterns"] == ["sub/model.Q4_K_M.gguf"]
    assert hub.calls[0]["ignore_patterns"] is None


def test_a_part_of_a_split_file_asks_for_all_parts(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "m-00001-of-00002.gguf").touch()
    assert resolve("org/name:m-00002-of-00002.gguf", tmp_path) == hub.folder / "m-00001-of-00002.gguf"
    assert hub.calls[0]["allow_patterns"] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_a_file_name_is_no_pattern(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "m[1]*.gguf").touch()
    resolve("org/name:m[1]*.gguf", tmp_path)
    names = ["m[1]*.gguf", "m1.gguf", "m1x.gguf"]
    taken = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=hub.calls[0]["allow_patterns"])
    assert list(taken) == names[:1]


def test_offline_and_silence_are_passed_on(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (hub.folder / "model.safetensors").touch()
    resolve("org/name", tmp_path, offline=True, progress=False)
    (call,) = hub.calls
    assert call["local_files_only"] is True
    with call["tqdm_class"](total=3, desc="bytes", disable=False) as bar:
        bar.update(3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("hub")
def test_a_repository_without_safetensors_says_how_to_name_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/name: has no safetensors.*org/name:FILE\.gguf"):
        resolve("org/name", tmp_path)


@pytest.mark.usefixtures("hub")
def test_a_file_that_is_not_in_the_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/name: has no file model\.gguf"):
        resolve("org/name:model.gguf", tmp_path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            http_error(errors.RepositoryNotFoundError, 404),
            ["neither a local path nor a model", "HF_TOKEN"],
        ),
        (http_error(errors.GatedRepoError, 403), ["gated", "https://huggingface.co/org/name", "HF_TOKEN"]),
        (http_error(errors.HfHubHTTPError, 500), ["cannot be fetched", "500 from the server"]),
        (errors.LocalEntryNotFoundError("no connection"), ["cannot be reached", "no connection"]),
        (errors.OfflineModeIsEnabled("offline mode"), ["cannot be reached", "offline mode"]),
        (UnheardOfError("too slow"), ["cannot be fetched", "too slow"]),
        (OSError(28, "No space left on device"), ["cannot be fetched", "No space left"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_hubs_errors_become_ours(hub: Hub, tmp_path: Path, error: Exception, words: list[str]) -> None:
    hub.error = error
    with pytest.raises(CheckpointError) as caught:
        resolve("org/name", tmp_path)
    for word in ("model org/name", *words):
        assert word in str(caught.value)
    assert caught.value.__cause__ is error


def test_offline_a_model_that_is_not_cached_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.error = errors.LocalEntryNotFoundError("not there")
    with pytest.raises(
        CheckpointError, match=r"org/name: is neither a local path nor \(wholly\) in the Hugging Face cache.*offline"
    ):
        resolve("org/name", tmp_path, offline=True)


def test_offline_the_real_library_does_not_find_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        CheckpointError, match=r"org/name: is neither a local path nor \(wholly\) in the Hugging Face cache.*offline"
    ):
        resolve("org/name", tmp_path, offline=True)
