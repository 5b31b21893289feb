from dataclasses import dataclass, replace

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule

from hybridrl.models.families.decoder import decoder_family, decoder_rows, decoder_shape
from hybridrl.models.family import Row
from hybridrl.models.mixers import MixerShape

LOCAL, HF = "decoder.layers.{L}.self_attention.", "model.layers.{L}.mixer."


class DecayingSum(MegatronModule):
    def __init__(self, config, sizes, layer_number, pg_collection=None, **_):
        super().__init__(config=config)
        width, hidden, own = sizes.width, config.hidden_size, {"config": config, "bias": False}
        init, last = config.init_method, config.output_layer_init_method
        self.linear_in = ColumnParallelLinear(hidden, width, init_method=init, **own)
        self.linear_out = RowParallelLinear(
            width, hidden, init_method=last, input_is_parallel=True, skip_bias_add=True, **own
        )

    def forward(self, hidden_states, attention_mask, packed_seq_params=None, **_):
        tokens, _ = self.linear_in(hidden_states)  # (tokens, 1, this rank's channels)
        samples = tokens.split(packed_seq_params.cu_seqlens_q.diff().tolist())
        return self.linear_out(torch.cat([self.recurrence(sample) for sample in samples]))

    def recurrence(self, sample):
        time = torch.arange(len(sample), device=sample.device)
        weights = (0.9 ** (time[:, None] - time)).tril().to(sample.dtype)
        return torch.einsum("ts,sbc->tbc", weights, sample)


@dataclass(frozen=True)
class SumShape(MixerShape):
    width: int
    module, name = "own_hybrid:DecayingSum", "decaying sums"

    @property
    def divided(self):
        return {"own_width": self.width}

    @property
    def token_flops(self):
        return 2 * self.width

    def state_bytes(self, tp, itemsize):
        return self.width * itemsize // tp

    def matmul_params(self, hidden_size):
        return 2 * hidden_size * self.width

    def stored_elements(self, hidden_size):
        return hidden_size + 2 * self.width


def shape(hf_config):
    return replace(decoder_shape(hf_config), mixer=SumShape((0, 2), hf_config["own_width"]))


def rows(shape):
    width, hidden, layers = shape.mixer.width, shape.hidden_size, shape.mixer.layers
    into, out = ((width, hidden),), ((hidden, width),)
    return (
        *decoder_rows(shape),
        Row(f"{LOCAL}linear_in.weight", (f"{HF}in.weight",), into, "column", layers=layers),
        Row(f"{LOCAL}linear_out.weight", (f"{HF}out.weight",), out, "row", layers=layers),
    )


FAMILY = decoder_family("own", "OwnForCausalLM", shape, {"own_width"}, rows=rows)
