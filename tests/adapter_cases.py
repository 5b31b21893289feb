"""Random LoRA adapters for engines of tiny models, and PEFT's model with the same adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hybridrl.config.wrapped_models import text_name
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import HF_A, HF_B, only_adapters
from hybridrl.models.boxes import Box
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.weights import hf_shapes

PREFIX = "base_model.model."


def with_adapter(model: torch.nn.Module, lora: Lora, targets: list[str], seed: int) -> Any:
    """Returns PEFT's model with a random adapter; wraps `model` in place."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, config).eval()
    draw_adapter(wrapped, seed)
    return wrapped


def draw_adapter(wrapped: Any, seed: int) -> None:
    """Replaces the adapter by another random one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                scale = 0.6 * parameter.shape[-1] ** -0.5 if "lora_A" in name else 0.3
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def save_adapter(wrapped: Any, folder: Path) -> None:
    """Writes the adapter as PEFT does."""
    wrapped.save_pretrained(folder)


def hf_tensors(wrapped: Any, lora: Lora) -> dict[str, Tensor]:
    """Returns base weights and adapters by HF names, as engines receive them: B with its scale."""
    found: dict[str, Tensor] = {}
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            own = name.removeprefix(PREFIX).replace(".default", "")
            found[own] = parameter.detach() * (lora.scale if "lora_B" in own else 1)
    base = wrapped.get_base_model()
    tensors = checkpoint_tensors(base, base.config.to_dict())
    for name, tensor in tensors.items():
        if "lora_" not in name:
            found[name.replace(".base_layer", "")] = tensor.detach()
    return found


def merge_random(
    model: Any,
    family: Family,
    shape: ModelShape,
    seed: int,
    hf_config: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """Returns the model with a random adapter in its own weights, and all weights apart."""
    generator = torch.Generator().manual_seed(seed)
    base = checkpoint_tensors(model, hf_config or model.config.to_dict())
    tensors = {name: tensor.detach().clone() for name, tensor in base.items()}
    for name, size in hf_shapes(only_adapters(family), shape).items():
        scale = 0.6 * size[-1] ** -0.5 if name.endswith(HF_A) else 0.3
        tensors[name] = scale * torch.randn(size, generator=generator)
    linears = {text_name(name): module for name, module in model.named_modules()}
    with torch.no_grad():
        for name in [one for one in tensors if one.endswith(HF_B)]:
            layer = name.removesuffix(f".{HF_B}")
            linears[layer].weight += tensors[name] @ tensors[f"{layer}.{HF_A}"]
    return model, tensors


def part(tensor: Tensor, box: Box) -> Tensor:
    """Returns a rectangle of a tensor."""
    return tensor[tuple(slice(*span) for span in box)]


def write_tensors(engine: Any, tensors: dict[str, Tensor], version: int) -> None:
    """Writes tensors, by HF name, into an engine by its own layout."""
    engine.begin_update()
    own = engine.tensors()
    for region in engine.layout().regions:
        part(own[region.local], region.local_box).copy_(part(tensors[region.hf], region.hf_box))
    engine.finish_update(version)


def with_layers(
    model: torch.nn.Module, lora: Lora, layers: list[str], experts: bool, **options: Any
) -> Any:
    """Returns PEFT's model with adapters on these layers and, if `experts`, on all experts; wraps
    `model` in place. `options` are further settings of PEFT.

    PEFT 0.21 replaces the names of a mixture's projections by stacked experts. It then leaves out
    dense and shared layers of the same names, so it is kept from doing so.
    """
    from peft import LoraConfig, get_peft_model

    if experts:
        options |= {
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {r".*\.gate_up_proj": 2 * lora.rank},
            "alpha_pattern": {r".*\.gate_up_proj": 2 * lora.alpha},
        }
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=rf".*\.({'|'.join(layers)})",
        task_type="CAUSAL_LM",
        **options,
    )
    conversion = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
    with mock.patch(conversion):
        return get_peft_model(model, config)


def canonical(
    wrapped: Any, family: Family, shape: ModelShape, gradients: bool = False
) -> dict[str, Tensor]:
    """Returns views of the adapters of PEFT's model, or of their gradients, by HF names.

    PEFT stacks A of all experts as (expert, projection, rank) rows, and B as (projection, rank,
    expert) columns; B of gate and up has blocks of zeros.
    """
    rows = only_adapters(family).rows(shape)
    experts = {row.kind: row.parts for row in rows if row.num_experts and HF_B in row.parts[0]}
    found: dict[str, Tensor] = {}
    for name, parameter in wrapped.named_parameters():
        if "lora_" not in name:
            continue
        tensor = parameter.grad if gradients else parameter.detach()
        own = name.removeprefix(PREFIX).replace(".default", "")
        layer, is_expert, rest = own.partition(".mlp.experts.")
        if not is_expert:
            found[own] = tensor
            continue
        parts = experts["gate_up" if rest.startswith("base_layer") else "replicated"]
        num = shape.moe.num_experts
        for place, part in enumerate(parts):
            for expert in range(num):
                hf = part.format(L=int(layer.rpartition(".")[2]), E=expert)
                if "lora_A" in rest:
                    of_all = tensor.view(num, len(parts), -1, tensor.size(1))
                    found[hf.replace(HF_B, HF_A)] = of_all[expert, place]
                else:
                    ranks = tensor.size(1) // num // len(parts)
                    of_all = tensor.view(len(parts), -1, len(parts), ranks, num)
                    found[hf] = of_all[place, :, place, :, expert]
    return found
