"""From a ``config.json`` to a spec, in its old and its new spelling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.checkpoint.source import Checkpoint
from paceline.models.fields import MAX_HEAD_DIM, MAX_LAYERS, Fields, common_head_dim, kv_heads
from paceline.models.rope import linear_divisors, llama3_divisors
from paceline.models.spec import LayerSpec, ModelSpec, RopeSpec, TensorNames
from paceline.ops.api import Activation, RopeStyle

FULL = "full_attention"
SLIDING = "sliding_attention"

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def full_layers(config: Fields, num_layers: int) -> tuple[str, ...]:  # noqa: ARG001
    """Every layer sees everything."""
    return (FULL,) * num_layers


def sliding_layers(config: Fields, num_layers: int) -> tuple[str, ...]:
    """Every layer has the window, if there is one."""
    return (SLIDING if config.has("sliding_window") else FULL,) * num_layers


def upper_sliding_layers(config: Fields, num_layers: int) -> tuple[str, ...]:
    """Layers from ``max_window_layers`` on have the window, if it is switched on and no list says otherwise."""
    if not config.flag("use_sliding_window", False):
        return (FULL,) * num_layers
    if config.has("layer_types"):
        return _listed_layers(config, num_layers)
    first = config.integer("max_window_layers", low=0)
    return tuple(SLIDING if i >= first else FULL for i in range(num_layers))


def patterned_layers(config: Fields, num_layers: int) -> tuple[str, ...]:
    """One layer in ``sliding_window_pattern`` sees everything, if no list says otherwise."""
    if config.has("layer_types"):
        return _listed_layers(config, num_layers)
    pattern = config.integer("sliding_window_pattern", 6)
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))


@dataclass(frozen=True, slots=True)
class HfFamily:
    """What the architecture implies and the config does not say.

    Attributes:
        bias_key, ffn_bias_key: flags that give biases to the attention's and the feed-forward's projections.
        qkv_bias: queries, keys and values always have biases.
        theta, head_dim, tied_head: used where the config is silent; head_dim None shares the width among the heads.
        local_theta: base of the rotation in sliding layers, if it is one of their own.
        layer_kinds: which layers slide.
        scaled_embedding: token vectors are multiplied by the square root of the width.
    """

    names: TensorNames
    rope_style: RopeStyle = RopeStyle.HALVES
    bias_key: str | None = None
    ffn_bias_key: str | None = None
    qkv_bias: bool = False
    theta: float = 10_000.0
    local_theta: float | None = None
    head_dim: int | None = None
    tied_head: bool = False
    layer_kinds: Callable[[Fields, int], tuple[str, ...]] = full_layers
    activation_key: str = "hidden_act"
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False


def read_hf_spec(checkpoint: Checkpoint, architecture: str, family: HfFamily) -> ModelSpec:
    """Raises CheckpointError, naming the key, for values that are absent, absurd or not supported."""
    config = Fields(str(checkpoint.path / "config.json"), checkpoint.metadata)
    generation = Fields(str(checkpoint.path / "generation_config.json"), checkpoint.generation_config)
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is set, but quantised safetensors are not supported")
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "is true, but only causal attention is supported")

    vocab_size = config.integer("vocab_size")
    hidden_size = config.integer("hidden_size")
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = _head_dim(config, family)
    activation = config.text(family.activation_key)
    if activation not in _ACTIVATIONS:
        raise config.error(family.activation_key, f"{activation!r} is not one of {', '.join(_ACTIVATIONS)}")

    ropes = {kind: _read_rope(config, family, kind, head_dim) for kind in (FULL, SLIDING)}
    kinds = family.layer_kinds(config, num_layers)
    window = config.integer("sliding_window") if SLIDING in kinds else 0
    attention_bias = family.bias_key is not None and config.flag(family.bias_key, False)
    eos = {*config.token_ids("eos_token_id", vocab_size), *generation.token_ids("eos_token_id", vocab_size)}
    bos = config.token_ids("bos_token_id", vocab_size)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=kv_heads(config, "num_attention_heads", "num_key_value_heads"),
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        activation=_ACTIVATIONS[activation],
        layers=tuple(LayerSpec(window if kind == SLIDING else 0, ropes[kind]) for kind in kinds),
        attention_scale=config.number("query_pre_attn_scalar", head_dim) ** -0.5,
        norm_offset=family.norm_offset,
        attention_softcap=config.number("attn_logit_softcapping") if config.has("attn_logit_softcapping") else 0.0,
        final_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else 0.0,
        # In float32, as in every float32 run of these models; only a bf16 run rounds the factor itself to bf16.
        embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else 1.0,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        ffn_bias=family.ffn_bias_key is not None and config.flag(family.ffn_bias_key, False),
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        tied_head=config.flag("tie_word_embeddings", family.tied_head),
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=bos[0] if bos else None,
    )


def _head_dim(config: Fields, family: HfFamily) -> int:
    if config.has("head_dim") or family.head_dim is not None:
        head_dim = config.integer("head_dim", family.head_dim, high=MAX_HEAD_DIM)
    else:
        head_dim = common_head_dim(config, "hidden_size", "num_attention_heads")
    if head_dim % 2:
        raise config.error("head_dim", f"must be even to be rotated, but is {head_dim}")
    return head_dim


def _listed_layers(config: Fields, num_layers: int) -> tuple[str, ...]:
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise config.error("layer_types", f"{kind!r} is not one of {FULL}, {SLIDING}")
    return kinds


def _read_rope(config: Fields, family: HfFamily, kind: str, head_dim: int) -> RopeSpec:
    """The rotation of one kind of layer.

    New configs have ``rope_parameters``, for all layers or for each kind; old ones ``rope_theta`` and ``rope_scaling``,
    where a base of the sliding layers' own (``rope_local_base_freq``) comes without scaling.
    """
    given = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    if given.has(kind):
        given = given.section(kind)
    elif kind == SLIDING and family.local_theta is not None:
        return RopeSpec(config.number("rope_local_base_freq", family.local_theta), head_dim, family.rope_style)
    theta = given.number("rope_theta", config.number("rope_theta", family.theta))
    for fields in (given, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "other than 1 is not supported")

    type_key = "rope_type" if given.has("rope_type") else "type"
    rope_type = given.text(type_key, "default")
    match rope_type:
        case "default":
            divisors: tuple[float, ...] = ()
        case "linear":
            divisors = linear_divisors(given.number("factor"), head_dim)
        case "llama3":
            low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
            if not low < high:
                raise given.error("high_freq_factor", f"must be above low_freq_factor {low}, but is {high}")
            context = given.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))
            divisors = llama3_divisors(theta, head_dim, given.number("factor"), low, high, context)
        case _:
            raise given.error(type_key, f"{rope_type!r} is not supported; default, linear and llama3 are")
    return RopeSpec(theta, head_dim, family.rope_style, divisors)
