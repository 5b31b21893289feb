"""The single table of the versions of Python and of packages that hybridrl supports.

setup.py executes this module before anything is installed, and also on older Python versions, to
tell their users to upgrade. It therefore imports nothing. Lower bounds were tested together (except
torch's): a model was trained and converted on CPU, and unit tests passed. The upper bound is the
first untested version of torch, megatron-core and transformers, and the next major version of
others. Code for Megatron-Core's versions: checkpoint/torch_dist_format.py,
models/megatron/specs.py, platform.py.
"""

PYTHON = ">=3.11"

# Supported versions of megatron-core, and the hardware on which each was tested. On Python 3.11
# only 0.16.1 can be installed, because 0.17 and later require 3.12.
MEGATRON_CORE = {"0.16.1": "CPU, H100, H200", "0.19.2": "CPU, one H100"}

REQUIRED = {
    "torch": ">=2.11,<2.16",  # tensors and collectives; the tested range
    "megatron-core": ">=0.16.1,!=0.17.*,!=0.18.*,<0.20",  # training; see MEGATRON_CORE
    "numpy": ">=2.0,<3",  # token data; imported by megatron-core
    "packaging": ">=24.2,<27",  # versions of packages; imported by megatron-core
    # Whether the process that locked a run folder is alive; undeclared by megatron-core.
    "psutil": ">=5.9,<8",
    "einops": ">=0.7,<1",  # undeclared dependency of megatron-core (process grid)
    # HF configs, tokenizers and the hf engine. Versions before 5 ignore `rope_parameters`, and
    # therefore compute wrong positions for a current config.json.
    "transformers": ">=5.0,<5.25",
    "tokenizers": ">=0.22,<0.24",  # checks tokenizer.json before ranks start
    "huggingface_hub": ">=1.3,<3",  # hub names of models
    "safetensors": ">=0.5,<1",  # weights in HF directories, read in slices
    "xxhash": ">=3.0,<5",  # digests of checkpoint files
    "pyarrow": ">=21,<27",  # memory-mapped files of tokenized prompts; parquet files
    "pydantic": ">=2.7,<3",  # the configuration schema
    "omegaconf": ">=2.3,<3",  # YAML and key=value overrides
    "pyyaml": ">=6,<7",  # YAML errors; imported by omegaconf
    "typer": ">=0.19,<1",  # the command line; versions before 0.19 do not support Literal
    "rich": ">=13.7,<16",  # tables and progress on the console
    "tensorboard": ">=2.18,<3",  # event files; versions before 2.18 cannot be imported with numpy 2
    "jinja2": ">=3.1,<4",  # chat templates, the HTML report, scheduler scripts
}

# The newest version of each package with which the suites that docs/guides/versions.md lists have
# run. `hybridrl check` prints it.
NEWEST_TESTED = {
    "torch": "2.15.0",
    "megatron-core": "0.19.2",
    "numpy": "2.5.5",
    "packaging": "26.4",
    "psutil": "7.2.2",
    "einops": "0.8.2",
    "transformers": "5.24.0",
    "tokenizers": "0.23.3",
    "huggingface_hub": "2.4.0",
    "safetensors": "0.8.0",
    "xxhash": "4.1.0",
    "pyarrow": "26.0.1",
    "pydantic": "2.14.4",
    "omegaconf": "2.4.0",
    "pyyaml": "6.0.4",
    "typer": "0.29.2",
    "rich": "15.0.0",
    "tensorboard": "2.21.0",
    "jinja2": "3.1.6",
}
