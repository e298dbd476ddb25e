"""The same model with its matrices stored in another type, as a GGUF file in the cache.

    python benchmarks/convert.py MODEL.gguf BF16

Needs the ``gguf`` package. The numbers are those of the source, rounded to the new type: a file made from a quantised
one is a fair subject for speed, and for what a further rounding costs; it is not as good as one made from the original
weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paceline.config import read_environment

TYPES = ("Q4_0", "Q4_1", "Q8_0", "BF16", "F32")


def main() -> None:
    parser = argparse.ArgumentParser(description="Store a GGUF model's matrices in another type.")
    parser.add_argument("source", type=Path)
    parser.add_argument("type", choices=TYPES)
    args = parser.parse_args()
    print(convert(args.source, args.type))


def convert(source: Path, type_name: str) -> Path:
    """The path of the converted file. It is made only once for each source and type."""
    folder = read_environment().cache / "benchmarks"
    target = folder / f"{source.stem}-as-{type_name}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(unfinished, str(reader.fields["general.architecture"].contents()))
    copy_fields(reader, writer, {})
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = type_of(tensor.name, numbers, type_name)
        writer.add_tensor(tensor.name, gguf.quantize(numbers, kind), raw_dtype=kind)
    finish(writer)
    return unfinished.rename(target)


def copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, changes: Mapping[str, Any]) -> None:
    """Everything that the file says of the model, with some values changed."""
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            is_array = field.types[0] is gguf.GGUFValueType.ARRAY
            value = changes.get(field.name, field.contents())
            writer.add_key_value(field.name, value, field.types[0], sub_type=field.types[-1] if is_array else None)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def type_of(name: str, numbers: np.ndarray, type_name: str) -> gguf.GGMLQuantizationType:
    if numbers.ndim < 2 or numbers.shape[-1] % 32:
        return gguf.GGMLQuantizationType.F32
    # As llama.cpp's own tool does: the embedding, which is often the head as well, keeps more bits than Q4_0 has.
    if name == "token_embd.weight" and type_name.startswith("Q4"):
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType[type_name]


if __name__ == "__main__":
    main()
