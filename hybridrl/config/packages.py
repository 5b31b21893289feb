"""The one table of what hybridrl needs: Python and packages, with the versions it was tested with.

Read by setup.py, which executes this file alone before anything is installed, and by `hybridrl
check`. It imports nothing, and older Python reads it too, to be told that it is too old.

Lower bounds: versions with which, all of them at once but for torch's, a model was trained and
converted on CPU and the unit tests of configuration, models and data passed. Upper bounds: of
torch, megatron-core and transformers the next version that was not tested, of others the next major
one.

Megatron-Core's versions differ in what hybridrl calls of them. What adapts to that:
checkpoint/torch_dist_format.py (files of a checkpoint), models/megatron/specs.py (parts of a layer)
and platform.py (CPU).
"""

PYTHON = ">=3.11"

# Versions of megatron-core, and where the tests have run with each. Python 3.11 gets 0.16.1 alone:
# 0.17 and later ask for 3.12.
MEGATRON_CORE = {
    "0.16.1": "CPU, H100, H200",
    "0.19.2": "CPU, one H100",
}

REQUIRED = {
    "torch": ">=2.11,<2.14",  # tensors and collectives; the range that the tests have run on
    "megatron-core": ">=0.16.1,!=0.17.*,!=0.18.*,<0.20",  # training; MEGATRON_CORE says more
    "numpy": ">=2.0,<3",  # token data; imported by megatron-core
    "packaging": ">=24.2,<27",  # versions of packages; imported by megatron-core
    # Whether the process that holds a run folder still runs; used by megatron-core, undeclared.
    "psutil": ">=5.9,<8",
    "einops": ">=0.7,<1",  # used by megatron-core's process grid, undeclared
    # HF configs, tokenizers and the hf engine. Before 5 it passes over `rope_parameters`, and so
    # computes other positions than a config.json says that is written today. vLLM's CPU build takes
    # none from 5.20 on.
    "transformers": ">=5.0,<5.20",
    "tokenizers": ">=0.22,<0.24",  # judges tokenizer.json before ranks start
    "huggingface_hub": ">=1.3,<3",  # hub names of models
    "safetensors": ">=0.5,<1",  # weights of HF directories, read by slices
    "xxhash": ">=3.0,<5",  # digests of checkpoint files
    "pyarrow": ">=21,<27",  # files of tokenized prompts, which ranks map; parquet files
    "pydantic": ">=2.7,<3",  # the configuration schema
    "omegaconf": ">=2.3,<3",  # YAML and key=value overrides
    "pyyaml": ">=6,<7",  # errors of YAML; imported by omegaconf
    "typer": ">=0.19,<1",  # the command line; before 0.19 it takes no Literal
    "rich": ">=13.7,<16",  # tables and progress on the console
    "tensorboard": ">=2.18,<3",  # event files; before 2.18 it does not import with numpy 2
    "jinja2": ">=3.1,<4",  # chat templates, the report's page, files for schedulers
}
