"""Parameters that models share: which weights are built without memory."""

from __future__ import annotations

import torch

from hybridrl.models.megatron.shared_weights import take_weights, without_memory


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 4))
        self.weight.data = self.weight.data.to("cpu")  # fails without memory


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 5)
        self.inner.weight.allreduce = False
        self.head = torch.nn.Linear(4, 7)
        self.router = Router()


def test_only_linear_layers_are_built_without_memory() -> None:
    other = Part()
    with without_memory(num_vocab_rows=7):
        part = Part()
    assert part.inner.weight.is_meta
    assert not any(p.is_meta for name, p in part.named_parameters() if name != "inner.weight")
    assert not Part().inner.weight.is_meta
    take_weights([part], [other], {"0/head.weight", "0/inner.bias"}, torch.device("cpu"))
    assert part.head.weight is other.head.weight and part.inner.bias is other.inner.bias
    assert part.router.weight is not other.router.weight
    assert bool((part.inner.weight == 0).all()) and part.inner.weight.allreduce is False
