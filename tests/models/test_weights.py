"""Every tensor is accounted for before any is packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.checkpoint.source import Checkpoint
from paceline.errors import CheckpointError
from paceline.models.weights import count_parameters, load_model
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Encoding
from support.random_model import random_checkpoint
from support.raw_tensors import encode

EXTRA = encode(np.ones((3, 5), np.float32), Encoding.F32)


def load(checkpoint: Checkpoint) -> None:
    load_model(checkpoint, ReferenceOps(), max_positions=32)


def changed(checkpoint: Checkpoint, remove: tuple[str, ...] = (), **add: object) -> Checkpoint:
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in remove}
    return replace(checkpoint, tensors={**tensors, **{name.replace("__", "."): t for name, t in add.items()}})


def test_missing_unknown_and_misshapen_tensors_are_named_together() -> None:
    checkpoint = changed(
        random_checkpoint(),
        remove=("model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
        model__layers__2__mlp__up_proj__weight=EXTRA,
        model__layers__0__self_attn__q_proj__weight=EXTRA,
    )
    with pytest.raises(CheckpointError) as error:
        load(checkpoint)
    message = str(error.value)
    assert message.startswith("random: ")
    assert "LlamaForCausalLM" in message
    assert "missing: model.norm.weight, model.layers.1.mlp.up_proj.weight;" in message
    assert "unknown: model.layers.2.mlp.up_proj.weight;" in message
    assert "of the wrong shape: model.layers.0.self_attn.q_proj.weight is (3, 5), not (128, 64)" in message


def test_a_long_list_of_tensors_is_cut() -> None:
    checkpoint = replace(random_checkpoint(), tensors={})
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight, .* and 13 more$"):
        load(checkpoint)


def test_a_bias_that_the_config_does_not_mention_is_unknown() -> None:
    with pytest.raises(CheckpointError, match=r"unknown: model\.layers\.0\.self_attn\.q_proj\.bias$"):
        load(changed(random_checkpoint(), model__layers__0__self_attn__q_proj__bias=EXTRA))


def test_tensors_that_nobody_needs_are_no_harm() -> None:
    load(
        changed(
            random_checkpoint(tie_word_embeddings=True),
            model__layers__0__self_attn__rotary_emb__inv_freq=EXTRA,
            lm_head__weight=EXTRA,
        )
    )


def test_a_head_is_needed_unless_it_is_tied() -> None:
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight$"):
        load(changed(random_checkpoint(), remove=("lm_head.weight",)))
    load(changed(random_checkpoint(tie_word_embeddings=True), remove=("lm_head.weight",)))


def test_a_tied_head_counts_once() -> None:
    untied, tied = random_checkpoint(), random_checkpoint(tie_word_embeddings=True)
    sizes = {name: int(np.prod(tensor.shape)) for name, tensor in untied.tensors.items()}
    assert count_parameters(untied) == sum(sizes.values())
    assert count_parameters(tied) == sum(sizes.values()) - sizes["lm_head.weight"]
