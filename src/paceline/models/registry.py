"""The architectures that work, by the names that checkpoints give them. No other file names a model."""

from __future__ import annotations

from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError
from paceline.models.gguf_config import GgufFamily, read_gguf_spec
from paceline.models.gguf_names import GGUF_NAMES
from paceline.models.hf_config import (
    HfFamily,
    patterned_layers,
    read_hf_spec,
    sliding_layers,
    upper_sliding_layers,
)
from paceline.models.hf_names import HF_NAMES, HF_SANDWICH_NAMES
from paceline.models.spec import ModelSpec, TensorNames
from paceline.ops.api import Activation, RopeStyle

_ERNIE = HfFamily(
    HF_NAMES,
    rope_style=RopeStyle.PAIRS,
    bias_key="use_bias",
    ffn_bias_key="use_bias",
    theta=500_000.0,
    head_dim=128,
    tied_head=True,
)

HF_FAMILIES = {
    "LlamaForCausalLM": HfFamily(HF_NAMES, bias_key="attention_bias", ffn_bias_key="mlp_bias"),
    "MistralForCausalLM": HfFamily(HF_NAMES, layer_kinds=sliding_layers),
    "Qwen2ForCausalLM": HfFamily(HF_NAMES, qkv_bias=True, layer_kinds=upper_sliding_layers),
    "Qwen3ForCausalLM": HfFamily(
        HF_NAMES, bias_key="attention_bias", head_dim=128, qk_norm=True, layer_kinds=upper_sliding_layers
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_ForCausalLM": _ERNIE,
    "Gemma3ForCausalLM": HfFamily(
        HF_SANDWICH_NAMES,
        bias_key="attention_bias",
        theta=1_000_000.0,
        local_theta=10_000.0,
        head_dim=256,
        tied_head=True,
        layer_kinds=patterned_layers,
        activation_key="hidden_activation",
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        scaled_embedding=True,
    ),
}
"""By the first entry of ``architectures`` in ``config.json``."""

GGUF_FAMILIES = {
    "llama": GgufFamily(rope_style=RopeStyle.PAIRS, interleaved_heads=True),
    "qwen2": GgufFamily(),
    "qwen3": GgufFamily(qk_norm=True),
    "ernie4_5": GgufFamily(rope_style=RopeStyle.PAIRS),
    "gemma3": GgufFamily(
        window_pattern=6,
        local_theta=10_000.0,
        activation=Activation.GELU_TANH,
        qk_norm=True,
        sandwich_norms=True,
        scaled_embedding=True,
        shared_scale_layers=62,
    ),
}
"""By ``general.architecture``. Norm weights are stored whole in GGUF, so there is no offset."""


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """What the checkpoint's metadata describe.

    Raises CheckpointError for an architecture that is not known, with those that are, and for metadata that are
    missing, absurd or ask for something that is not supported.
    """
    architecture = _architecture(checkpoint)
    if checkpoint.format is CheckpointFormat.GGUF:
        return read_gguf_spec(checkpoint, architecture, GGUF_FAMILIES[architecture])
    return read_hf_spec(checkpoint, architecture, HF_FAMILIES[architecture])


def tensor_names(checkpoint: Checkpoint) -> TensorNames:
    """How the checkpoint calls its tensors. Raises CheckpointError for an architecture that is not known."""
    architecture = _architecture(checkpoint)
    return GGUF_NAMES if checkpoint.format is CheckpointFormat.GGUF else HF_FAMILIES[architecture].names


def adapter_names(checkpoint: Checkpoint) -> TensorNames:
    """How adapters for the checkpoint's model call its linear layers: as safetensors do, whatever its own format is."""
    # All families have the same names for these; the names of this one are complete.
    return HF_SANDWICH_NAMES if checkpoint.format is CheckpointFormat.GGUF else tensor_names(checkpoint)


def interleaves_heads(checkpoint: Checkpoint) -> bool:
    """Whether the outputs of queries and keys are in another order than adapters have them.

    Adapters have the elements that are rotated together in the halves of a head; some files have them side by side.
    """
    architecture = _architecture(checkpoint)
    return checkpoint.format is CheckpointFormat.GGUF and GGUF_FAMILIES[architecture].interleaved_heads


def _architecture(checkpoint: Checkpoint) -> str:
    if checkpoint.format is CheckpointFormat.GGUF:
        name, known = checkpoint.metadata.get("general.architecture"), sorted(GGUF_FAMILIES)
    else:
        names = checkpoint.metadata.get("architectures")
        name, known = (names[0] if isinstance(names, list) and names else None), sorted(HF_FAMILIES)
    if name not in known:
        raise CheckpointError(f"{checkpoint.path}: architecture {name!r} is not supported; {', '.join(known)} are")
    return str(name)
