"""Built-in model families by name; each is imported on first use."""

FAMILIES: dict[str, str] = {
    "llama": "hybridrl.models.families.llama:FAMILY",
    "qwen2": "hybridrl.models.families.qwen2:FAMILY",
    "qwen3": "hybridrl.models.families.qwen3:FAMILY",
    "qwen3_vl": "hybridrl.models.families.qwen3_vl:FAMILY",
    "qwen3_5_text": "hybridrl.models.families.qwen3_5:FAMILY",
    "qwen3_moe": "hybridrl.models.families.qwen3_moe:FAMILY",
    "qwen2_moe": "hybridrl.models.families.qwen2_moe:FAMILY",
    "glm4_moe": "hybridrl.models.families.glm4_moe:FAMILY",
    "olmoe": "hybridrl.models.families.olmoe:FAMILY",
    "deepseek_v3": "hybridrl.models.families.deepseek_v3:FAMILY",
    "mistral": "hybridrl.models.families.mistral:FAMILY",
    "smollm3": "hybridrl.models.families.smollm3:FAMILY",
    "granite": "hybridrl.models.families.granite:FAMILY",
    "phi3": "hybridrl.models.families.phi3:FAMILY",
    "olmo2": "hybridrl.models.families.olmo2:FAMILY",
    "glm4": "hybridrl.models.families.glm4:FAMILY",
    "gemma2": "hybridrl.models.families.gemma2:FAMILY",
    "gemma3_text": "hybridrl.models.families.gemma3:FAMILY",
    "gpt_oss": "hybridrl.models.families.gpt_oss:FAMILY",
    "mixtral": "hybridrl.models.families.mixtral:FAMILY",
}
