"""Generates greedily with vLLM alone and a PEFT directory, as a program without hybridrl would.

plain_vllm.py MODEL_FOLDER PEFT_FOLDER PROMPTS   prints the tokens of each prompt as JSON
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, adapter, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_memory_bytes=8 << 20,
        enable_lora=True,
        max_lora_rank=8,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    done = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        sampling,
        lora_request=LoRARequest("exported", 1, adapter),
        use_tqdm=False,
    )
    print(json.dumps([list(one.outputs[0].token_ids) for one in done]))


if __name__ == "__main__":
    main()
