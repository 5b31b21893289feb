"""Copies of latent attention's projection up in engines: found, made again, compared."""

from __future__ import annotations

import pytest
import torch

from hybridrl.errors import ModelError
from hybridrl.models.family import LatentShape
from hybridrl.rollout.common.weight_copies import LatentCopies
from hybridrl.rollout.sglang import adapter as sglang
from hybridrl.rollout.vllm import adapter as vllm

OF_PACKAGES = {"vllm": vllm.COPIES, "sglang": sglang.COPIES}
LATENT = LatentShape(6, 5, 3, 2, 4)


class Norm(torch.nn.Module):
    variance_epsilon = 1e-5


def latent_model(copies: LatentCopies, num_layers: int, without: str = "") -> torch.nn.Module:
    """Layers of latent attention: 2 heads of 3 + 4, latents of 5; the last lacks one module."""
    layers = []
    for index in range(num_layers):
        parts: dict[str, torch.nn.Module] = {
            "q_a_layernorm": Norm(),
            "kv_a_layernorm": Norm(),
            "kv_b_proj": torch.nn.Linear(5, 14, bias=False),
        }
        made = {copies.keys: torch.zeros(2, 3, 5), copies.values: torch.zeros(2, 5, 4)}
        if index == num_layers - 1:
            parts.pop(without, None)
            made |= {name: None for name in made if name == without}
        layer = torch.nn.ModuleDict(parts)
        setattr(layer, copies.num_heads, 2)
        layer.qk_nope_head_dim = 3
        for name, copy in made.items():
            setattr(layer, name, copy)
        layers.append(layer)
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("copies", OF_PACKAGES.values(), ids=OF_PACKAGES)
def test_latent_attention_is_taken_where_all_is_found(copies: LatentCopies) -> None:
    copies.check(latent_model(copies, 3), LATENT, 3, "vllm 1")
    no_queries = LatentShape(0, 5, 3, 2, 4)
    model = latent_model(copies, 1, without="q_a_layernorm")
    copies.check(model, no_queries, 1, "vllm 1")


@pytest.mark.parametrize("copies", OF_PACKAGES.values(), ids=OF_PACKAGES)
@pytest.mark.parametrize("name", ["q_a_layernorm", "kv_a_layernorm", "keys", "values"])
def test_latent_attention_of_other_names_is_refused(copies: LatentCopies, name: str) -> None:
    model = latent_model(copies, 3, without=getattr(copies, name, name))
    with pytest.raises(ModelError, match="vllm 1") as caught:
        copies.check(model, LATENT, 3, "vllm 1")
    assert (copies.keys if hasattr(copies, name) else "norm") in str(caught.value)


@pytest.mark.parametrize("copies", OF_PACKAGES.values(), ids=OF_PACKAGES)
def test_copies_are_made_again_where_they_are_and_the_first_stale_one_is_named(
    copies: LatentCopies,
) -> None:
    model = latent_model(copies, 2)
    assert copies.stale(model) == f"0.{copies.keys}"
    places = [getattr(layer, copies.values).data_ptr() for layer in model]
    copies.absorb(model)
    assert copies.stale(model) is None
    assert places == [getattr(layer, copies.values).data_ptr() for layer in model]
    for layer in model:
        latent = torch.randn(5)
        up = layer["kv_b_proj"](latent).view(2, 7)
        torch.testing.assert_close(getattr(layer, copies.keys) @ latent, up[:, :3])
        torch.testing.assert_close(latent @ getattr(layer, copies.values), up[:, 3:])
    getattr(model[1], copies.values)[1, 4, 3] += 1
    assert copies.stale(model) == f"1.{copies.values}"
    assert copies.is_copy(f"1.{copies.values}") and not copies.is_copy("1.kv_b_proj.weight")
