"""SmolLM2-135M-Instruct from its GGUF file, against transformers with the same weights in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import Checkpoint
from paceline.dequantize import to_float32
from paceline.models.registry import read_spec
from paceline.models.spec import ModelSpec
from paceline.models.weights import load_model
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Array
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from support.batches import Span, make_batch
from support.tiny_models import oracle_logits

NUM_TOKENS = 64
BLOCK_SIZE = 32
NEAR_TIE = 1e-3
"""Where the two likeliest tokens are closer than this, float32 does not tell which one it is."""

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    CHAT.format("What is the capital of France?"),
    CHAT.format("Name three animals that live in the sea."),
    CHAT.format("Write a Python function that reverses a list."),
    CHAT.format("Is 17 a prime number? Explain in one sentence."),
    CHAT.format("Übersetze ins Deutsche: good morning, my friend!"),
    CHAT.format("¿Cuál es la montaña más alta del mundo?"),
    CHAT.format("Tell me a joke about a cat and a 🐶."),
    CHAT.format("Summarise the story of Romeo and Juliet."),
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    '{"name": "Ada", "born": ',
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Q: How many legs does a spider have?\nA:",
    "SELECT name, age FROM users WHERE",
    "東京は",
    "In 1969, Neil Armstrong",
    "x",
]

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> LlamaForCausalLM:
    spec = read_spec(checkpoint)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.layers[0].rope.theta},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(hf_weights(checkpoint, spec), strict=False)
    return model.eval()


def hf_weights(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The file's tensors by the names, and for queries and keys in the order of rows, of transformers."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    layer_names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for i in range(spec.num_layers):
        names |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in layer_names.items()}
    weights = {}
    for name, tensor in checkpoint.tensors.items():
        values = to_float32(tensor)
        if "attn_q" in name or "attn_k" in name:
            pairs = values.reshape(-1, spec.head_dim // 2, 2, spec.hidden_size)
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        weights[names[name.removesuffix(".weight")] + ".weight"] = torch.from_numpy(values)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def log_softmax(logits: Array) -> Array:
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    checkpoint: Checkpoint, tokenizer: Tokenizer, oracle: LlamaForCausalLM
) -> None:
    """All prompts are answered in one batch; then transformers reads each prompt with its answer in one pass."""
    model = load_model(checkpoint, ReferenceOps(), max_positions=256)
    sequences = [tokenizer.encode(prompt, add_special=True) for prompt in PROMPTS]
    num_prompt = [len(tokens) for tokens in sequences]
    blocks_each = -(-(max(num_prompt) + NUM_TOKENS) // BLOCK_SIZE)
    tables = [range(i * blocks_each, (i + 1) * blocks_each) for i in range(len(PROMPTS))]
    kv = model.ops.make_kv(model.kv_layout, blocks_each * len(PROMPTS), BLOCK_SIZE)
    steps: list[Array] = []
    starts = [0] * len(PROMPTS)
    for _ in range(NUM_TOKENS):
        spans = [
            Span(table, start, len(tokens) - start, tokens[start:])
            for table, start, tokens in zip(tables, starts, sequences, strict=True)
        ]
        batch = make_batch(spans, BLOCK_SIZE)
        hidden = model.ops.take_rows(model.forward(batch, kv), batch.logit_rows)
        steps.append(model.logits(hidden))
        starts = [len(tokens) for tokens in sequences]
        for tokens, token in zip(sequences, steps[-1].argmax(axis=1), strict=True):
            tokens.append(int(token))

    compared = 0
    for i, tokens in enumerate(sequences):
        expected = oracle_logits(oracle, tokens[:-1])[num_prompt[i] - 1 :]
        actual = np.stack([step[i] for step in steps])
        second, first = np.sort(expected, axis=1)[:, -2:].T
        clear = first - second >= NEAR_TIE
        # Both read the same tokens at every position, so a near-tie does not spoil what comes after it.
        assert actual.argmax(axis=1)[clear].tolist() == expected.argmax(axis=1)[clear].tolist(), PROMPTS[i]
        assert np.abs(log_softmax(actual) - log_softmax(expected)).max() <= 1e-3, PROMPTS[i]
        compared += int(clear.sum())
    assert compared > 0.95 * NUM_TOKENS * len(PROMPTS)
