"""Adapters of tiny models, written by ``peft``."""

from __future__ import annotations

import math
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(model: PreTrainedModel, seed: int = 1, **changes: Any) -> peft.PeftModel:
    """The model with a random adapter, strong enough to change its tokens: of rank 4 everywhere, unless changed."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": ALL_MODULES, **changes})
    adapted = peft.get_peft_model(model, config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.8 / math.sqrt(parameter.shape[1]))
    return adapted
