"""Models from the Hugging Face Hub, kept in that library's own cache (``HF_HOME``)."""

from __future__ import annotations

import glob
import re
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from paceline.checkpoint.gguf import part_paths
from paceline.errors import CheckpointError

HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>[^:]+\.gguf))?", re.ASCII)
FOLDER_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
# Sub-folders and "consolidated" files hold the same weights once more, for other programs.
FOLDER_EXCEPTIONS = ["*/*", "consolidated*"]


def parse_hub_name(name: str) -> tuple[str, str | None] | None:
    """``org/name`` as (repository, None), ``org/name:file.gguf`` as (repository, file); None for anything else.

    A name that ends in ``.gguf`` without a colon is a path that was mistyped, and so is a file that climbs out of the
    repository.
    """
    match = HUB_NAME.fullmatch(name)
    if match is None or match["repo"].endswith(".gguf"):
        return None
    file = match["file"]
    if file is not None and (file.startswith("/") or ".." in PurePosixPath(file).parts):
        return None
    return match["repo"], file


def fetch_from_hub(repo: str, file: str | None, *, offline: bool, progress: bool) -> Path:
    """The local folder of a repository's safetensors checkpoint, or the path of one of its GGUF files (first part).

    Only what is needed is fetched, and nothing that is in the cache already. With ``offline`` the network is not used.
    Raises CheckpointError.
    """
    if file is None:
        folder = _snapshot(repo, FOLDER_PATTERNS, FOLDER_EXCEPTIONS, offline, progress)
        if not any(folder.glob("*.safetensors")):
            raise CheckpointError(
                f"model {repo}: has no safetensors files; if it has GGUF files, name one of them: {repo}:FILE.gguf"
            )
        return folder
    parts = part_paths(Path(file))
    folder = _snapshot(repo, [glob.escape(part.as_posix()) for part in parts], None, offline, progress)
    path = folder / parts[0]
    if not path.is_file():
        raise CheckpointError(f"model {repo}: has no file {parts[0]}{' in the cache' if offline else ''}")
    return path


def _snapshot(repo: str, allow: list[str], ignore: list[str] | None, offline: bool, progress: bool) -> Path:
    import huggingface_hub  # takes a noticeable part of a second, and local models never need it
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            allow_patterns=allow,
            ignore_patterns=ignore,
            local_files_only=offline,
            # None is the library's own bar, which shows itself on a terminal only.
            tqdm_class=None if progress else _NoBar,
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"model {repo}: is gated: accept its terms at https://huggingface.co/{repo}, "
            "then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {repo}: is neither a local path nor a model on Hugging Face; "
            "if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "the network may not be used (offline)" if offline else f"Hugging Face cannot be reached: {error}"
        raise CheckpointError(
            f"model {repo}: is neither a local path nor (wholly) in the Hugging Face cache, and {why}"
        ) from error
    except Exception as error:
        # Below the library lie HTTP clients and a transfer engine with errors of their own, which differ from version
        # to version. Whatever they raise, the model could not be fetched.
        raise CheckpointError(f"model {repo}: cannot be fetched from Hugging Face: {error}") from error
    return Path(folder)


class _NoBar(tqdm):  # type: ignore[misc]
    """A progress bar that never shows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})
