"""Rules between knobs, the number of ranks and the model's shape. No torch.

They read only the model's HF config.json and skip keys that it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Any

from hybridrl.config.algorithm import PolicyGradientConfig
from hybridrl.config.environment import environment_rules
from hybridrl.config.evaluation import evaluation_rules
from hybridrl.config.generation import generation_rules
from hybridrl.config.lag import lag_placement_rules, lag_rules
from hybridrl.config.placement import Machines, Placement, asks_for, least_ranks
from hybridrl.config.rules_agent import agent_rules
from hybridrl.config.rules_algorithm import policy_gradient_rules, supervised_rules
from hybridrl.config.rules_experts import replay_rules, rollout_expert_rules
from hybridrl.config.rules_images import image_rules
from hybridrl.config.rules_lora import lora_section_rules
from hybridrl.config.rules_mix import mix_rules, must_fit, online_rules
from hybridrl.config.rules_numerics import numerics_rules
from hybridrl.config.rules_optimizer import optimizer_rules
from hybridrl.config.rules_placement import (
    AUTO_ORDER,
    expert_grid_rules,
    expert_rules,
    layer_rules,
    num_experts,
    placed,
    placement_rules,
    split_rules,
)
from hybridrl.config.rules_quantization import quantization_rules
from hybridrl.config.rules_sampling import sampling_rules
from hybridrl.config.schema import (
    Config,
    GrpoConfig,
    ModelConfig,
    PpoConfig,
    RunConfig,
    TrainConfig,
)
from hybridrl.errors import UserError, short
from hybridrl.rollout.registry import ENGINES, offered_engines

MAX_NAME_BYTES = 255  # limit of common file systems
TRAINING_ONLY = ("steps.", "mix.")
ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")  # Megatron's default order


def default_world_size(config: Config, num_gpus: int) -> int:
    """Returns the number of ranks to start: one per GPU, or on CPU as many as the layouts need."""
    if num_gpus > 0:
        return num_gpus
    train, named = config.train, least_ranks(config.placement)
    plane = lcm(train.tp * train.cp, train.ep * train.etp)  # ranks of a pipeline stage
    return max(train.pp * plane, config.rollout.tp, named)


def check(
    config: Config,
    world_size: int,
    model_config: Mapping[str, Any] | None = None,
    default_dtype: str = "bfloat16",
    is_script: bool = False,
    machines: Machines | None = None,
) -> list[UserError]:
    """Returns every rule violated by a configuration whose values are valid individually.

    Args:
        model_config: The model's HF config.json, or None to check only the layout.
        default_dtype: Data type that model.dtype=auto selects on this host.
        is_script: Whether a user's script calls the function, and so needs other advice on the
            number of ranks.
        machines: Hardware of the ranks. If None, a placement by nodes or GPUs is not checked.
    """
    misplaced: list[UserError] = []
    laid_out: list[UserError] = []
    if machines is not None or not asks_for(config.placement, "node:", "gpu:"):
        placement, misplaced = placed(config, machines or Machines(world_size))
        laid_out += _layout_rules(config, placement, number_of_ranks(is_script))
        if not misplaced:
            laid_out += placement_rules(config, placement, model_config or {})
            laid_out += lag_placement_rules(config, placement)
    return [
        *_folder_rules(config.run),
        *_model_rules(config.model),
        *lora_section_rules(config),
        *misplaced,
        *laid_out,
        *_axes_rules(config),
        *_step_rules(config),
        *online_rules(config),
        *generation_rules(config),
        *lag_rules(config),
        *mix_rules(config),
        *_training_rules(config),
        *_release_rules(config, default_dtype),
        *optimizer_rules(config, default_dtype),
        *quantization_rules(config, default_dtype),
        *numerics_rules(config, model_config or {}),
        *sampling_rules(config),
        *environment_rules(config.environment, config.reward, config.rollout.max_new_tokens),
        *agent_rules(config),
        *evaluation_rules(config.eval, config.reward),
        *_token_rules(config, model_config or {}),
        *_shape_rules(config, model_config or {}),
        *image_rules(config, model_config or {}),
    ]


def without_training(found: Sequence[UserError]) -> list[UserError]:
    """Returns the violations that do not concern knobs that only training reads."""
    return [error for error in found if not error.name.startswith(TRAINING_ONLY)]


def number_of_ranks(is_script: bool = False) -> str:
    """Returns advice on how to change the number of ranks, as part of a sentence."""
    if "RANK" in os.environ:
        return "the number of ranks with torchrun's --nproc-per-node (and --nnodes)"
    if is_script:
        return "start the script with torchrun --nproc-per-node=N (python alone starts 1 rank)"
    return "the number of ranks with --world"


def _folder_rules(run: RunConfig) -> Iterator[UserError]:
    for key, path in (("run.dir", run.dir), ("run.name", run.name)):
        if "\0" in path or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.split("/")):
            allowed = f"folder names of at most {MAX_NAME_BYTES} bytes that contain no NUL"
            yield UserError(key, short(path), allowed, f"Shorten {key}.")


def _model_rules(model: ModelConfig) -> Iterator[UserError]:
    if model.path is not None and model.init is not None:
        found = f"{model.path!r} and {model.init!r}"
        remedy = "Keep model.path to load weights, or model.init to start from scratch."
        yield UserError("model.path and model.init", found, "exactly one of the two", remedy)
    if model.path is None and model.init is None:
        remedy = "Set model.path to an HF directory, or model.init to a config.json."
        yield UserError("model.path and model.init", "neither", "exactly one of the two", remedy)


def _layout_rules(config: Config, placement: Placement, ranks: str) -> Iterator[UserError]:
    train, rollout = config.train, config.rollout
    world_size, num_engines = len(placement.policy.ranks), len(placement.rollout)
    given = config.placement
    if world_size % (train.tp * train.pp * train.cp):
        found = f"{train.tp} * {train.pp} * {train.cp} = {train.tp * train.pp * train.cp}"
        allowed = f"a divisor of {_ranks_of('policy', world_size, given.policy.ranks)}"
        remedy = f"Change the layout, or {ranks}."
        yield UserError("train.tp * train.pp * train.cp", found, allowed, remedy)
    else:
        stage = world_size // train.pp
        yield from expert_grid_rules("train", stage, train.ep, train.etp, f", or {ranks}")
    if num_engines % rollout.tp:
        allowed = f"a divisor of {_ranks_of('rollout', num_engines, given.rollout.ranks)}"
        yield config.refused("rollout.tp", allowed, f"Change rollout.tp, or {ranks}.")


def _axes_rules(config: Config) -> Iterator[UserError]:
    train, rollout = config.train, config.rollout
    if not ENGINES[rollout.engine].is_tensor_parallel and rollout.tp != 1:
        allowed = f"1 with engine {rollout.engine!r}"
        yield config.refused("rollout.tp", allowed, "Set rollout.tp=1 or another engine.")
    if train.vpp > 1 and train.pp == 1:
        allowed = "1 without pipeline parallelism"
        yield config.refused("train.vpp", allowed, "Set train.vpp=1, or train.pp above 1.")
    yield from _order_rules(train)


def _ranks_of(role: str, size: int, ranks: str | None) -> str:
    return f"the {size} ranks of placement.{role}" if ranks else f"the world size {size}"


def is_megatron_order(order: str, pp: int, cp: int, ep: int) -> bool:
    """Whether Megatron can assign ranks to the axes in this order, joined by '-'.

    Its layout of expert layers has no cp axis, and its pipeline stages must contain the same ranks
    as in dense layers (megatron-core 0.16.1, parallel_state.initialize_model_parallel).
    """
    if pp == 1 or order.endswith("pp"):
        return True
    axes = order.split("-")
    is_cp_before, is_ep_before = (axes.index(axis) < axes.index("pp") for axis in ("cp", "ep"))
    return cp == ep and (cp == 1 or is_cp_before == is_ep_before)


def _order_rules(train: TrainConfig) -> Iterator[UserError]:
    if train.order == AUTO_ORDER:
        return
    if sorted(train.order.split("-")) != sorted(ORDER_AXES):
        allowed = f"{AUTO_ORDER}, or each of {', '.join(ORDER_AXES)} once, joined by '-'"
        remedy = f"Set train.order={AUTO_ORDER}, or Megatron's own {'-'.join(ORDER_AXES)}."
        yield UserError("train.order", repr(train.order), allowed, remedy)
    elif not is_megatron_order(train.order, train.pp, train.cp, train.ep):
        reason = f"because train.pp={train.pp}, train.cp={train.cp} and train.ep={train.ep}"
        allowed = f"an order that ends with pp, {reason}"
        remedy = f"Set train.order={AUTO_ORDER}, or put pp last."
        yield UserError("train.order", repr(train.order), allowed, remedy)


def _step_rules(config: Config) -> Iterator[UserError]:
    steps, algorithm = config.steps, config.algorithm
    if isinstance(algorithm, GrpoConfig) and steps.samples_per_prompt < algorithm.min_samples:
        reason = f"with algorithm {algorithm.name}, which compares the samples of each prompt"
        remedy = "Set steps.samples_per_prompt=8, or use ppo."
        least = f"{algorithm.min_samples} or more"
        yield config.refused("steps.samples_per_prompt", f"{least} {reason}", remedy)
    if algorithm.needs is not None and not algorithm.needs.rollouts:
        yield from supervised_rules(config, algorithm.needs)
    if isinstance(algorithm, GrpoConfig) and config.rollout.temperature == 0:
        reason = "because all greedy samples of a prompt are equal"
        allowed = f"above 0 with algorithm {algorithm.name}, {reason}"
        yield config.refused("rollout.temperature", allowed, "Set rollout.temperature=1.")
    for key in ("rollout.temperature", "eval.temperature"):
        yield from _temperature_rules(key, config)
    if isinstance(algorithm, PolicyGradientConfig):
        yield from policy_gradient_rules(config, algorithm)
    samples = steps.prompts_per_step * steps.samples_per_prompt
    if samples % steps.updates_per_step:
        allowed = f"a divisor of steps.prompts_per_step * steps.samples_per_prompt = {samples}"
        yield config.refused("steps.updates_per_step", allowed, "Change one of these three knobs.")


def _temperature_rules(key: str, config: Config) -> Iterator[UserError]:
    temperature, engine = config.value(key), config.rollout.engine
    lowest, highest = ENGINES[engine].lowest_temperature, ENGINES[engine].highest_temperature
    if temperature != 0 and not lowest <= temperature <= highest:
        nearest = min(max(temperature, lowest), highest)
        allowed = f"0, or {lowest} to {highest}, with rollout.engine={engine}"
        yield config.refused(key, allowed, f"Set {key}={nearest}, or rollout.engine=hf.")


def _training_rules(config: Config) -> Iterator[UserError]:
    steps, algorithm = config.steps, config.algorithm
    validates = config.data.validation is not None
    for key, wanted, sets in (
        ("steps.eval_every", 0 if validates else steps.eval_every, config.eval.sets),
        ("steps.stop_at_accuracy", steps.stop_at_accuracy, {}),
    ):
        if wanted and config.data.eval_prompts is None and not config.data.eval_share and not sets:
            allowed = "no value without data.eval_prompts or data.eval_share"
            remedy = "Set data.eval_prompts to a file of held-out prompts, or data.eval_share=0.05."
            yield UserError(key, wanted, allowed, remedy)
    if steps.stop_at_accuracy is not None and config.reward.accuracy_scorer() is None:
        allowed = "no value if it is unclear which scorer measures accuracy"
        remedy = f"Set reward.accuracy to one of {', '.join(config.reward.functions)}."
        yield config.refused("steps.stop_at_accuracy", allowed, remedy)
    if config.train.min_learning_rate > config.train.learning_rate:
        allowed = f"at most train.learning_rate = {config.train.learning_rate}"
        yield config.refused("train.min_learning_rate", allowed, "Lower train.min_learning_rate.")
    needs = algorithm.needs
    has_critic = needs is None or (needs.values and needs.policy)
    if config.train.critic_learning_rate is not None and needs is not None and not has_critic:
        allowed = f"no value with algorithm {algorithm.name}, which has no critic"
        remedy = "Remove train.critic_learning_rate, " + (
            "and set train.learning_rate." if needs.values else "or use ppo."
        )
        yield config.refused("train.critic_learning_rate", allowed, remedy)
    if isinstance(algorithm, PpoConfig) and 0 < steps.num_steps < algorithm.critic_warmup_steps:
        allowed = f"at most steps.num_steps = {steps.num_steps}"
        reason = "otherwise the policy is never trained"
        remedy = f"Lower algorithm.critic_warmup_steps, or raise steps.num_steps; {reason}."
        yield config.refused("algorithm.critic_warmup_steps", allowed, remedy)


def _release_rules(config: Config, default_dtype: str) -> Iterator[UserError]:
    if not config.train.release_weights_in_rollout:
        return
    dtype = default_dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype == "float32":
        yield UserError(
            "model.dtype",
            config.model.dtype + (" (float32 here)" if config.model.dtype == "auto" else ""),
            "bfloat16 with train.release_weights_in_rollout=true: with float32 the optimizer has "
            "no separate master weights from which to rebuild the weights",
            "Set model.dtype=bfloat16, or train.release_weights_in_rollout=false.",
        )
    if config.rollout.transport == "peer":
        yield config.refused(
            "rollout.transport",
            "auto or packed with train.release_weights_in_rollout=true: with peer, other ranks "
            "map the weights, so their memory could not be freed",
            "Set rollout.transport=packed, or train.release_weights_in_rollout=false.",
        )


def _token_rules(config: Config, shape: Mapping[str, Any]) -> Iterator[UserError]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    trained, key = longest, "rollout.max_new_tokens"
    needs = config.algorithm.needs
    if config.data.max_response_tokens is not None and needs is not None:
        key = "data.max_response_tokens"
        trained = config.data.max_prompt_tokens + config.data.max_response_tokens
        if needs.rollouts:
            allowed = f"no value with algorithm {config.algorithm.name}, which learns from samples"
            remedy = "Remove data.max_response_tokens, and set rollout.max_new_tokens."
            yield UserError(key, config.data.max_response_tokens, allowed, remedy)
    yield from must_fit(config, trained, f"data.max_prompt_tokens + {key}")
    if config.data.validation is not None and needs is not None and needs.rollouts:
        allowed = f"no value with algorithm {config.algorithm.name}, which learns from samples"
        remedy = "Remove data.validation, and set data.eval_prompts."
        yield UserError("data.validation", ", ".join(config.data.validation), allowed, remedy)
    positions = shape.get("max_position_embeddings")
    most_new = config.eval.most_new_tokens(config.rollout.max_new_tokens)
    is_long = isinstance(positions, int) and positions < config.data.max_prompt_tokens + most_new
    if is_long and ENGINES[config.rollout.engine].bounds_positions:
        allowed = f"at most the model's {positions} positions minus data.max_prompt_tokens"
        remedy = (
            "Lower rollout.max_new_tokens (or eval.max_new_tokens, if it is larger), or "
            "data.max_prompt_tokens."
        )
        yield UserError("rollout.max_new_tokens", most_new, allowed, remedy)


def _shape_rules(config: Config, shape: Mapping[str, Any]) -> Iterator[UserError]:
    train = config.train
    chunks = train.pp * train.vpp
    product = f"{train.pp} * {train.vpp} = {chunks}"
    yield from layer_rules("train.pp * train.vpp", chunks, shape, product)
    for key, tp in (("train.tp", train.tp), ("rollout.tp", config.rollout.tp)):
        yield from split_rules(key, tp, shape)
    yield from expert_rules("train", train.ep, train.etp, train.order, train.pp, shape)
    yield from rollout_expert_rules(config.rollout, shape)
    yield from replay_rules(config, shape)
    yield from _expert_model_rules(config, shape)


def _expert_model_rules(config: Config, shape: Mapping[str, Any]) -> Iterator[UserError]:
    experts = num_experts(shape)
    if not experts:
        for name, coefficient in config.train.moe:
            if shape and coefficient:
                allowed = "0 with a dense model, which has no experts"
                yield UserError(
                    f"train.moe.{name}", coefficient, allowed, f"Set train.moe.{name}=0."
                )
        return
    engine = config.rollout.engine
    if not ENGINES[engine].takes_experts:
        able = [name for name in offered_engines() if ENGINES[name].takes_experts]
        model = f"a mixture of experts (this model has {experts} per layer)"
        remedy = f"Set rollout.engine={able[0]}, or train a dense model."
        yield config.refused("rollout.engine", f"{', '.join(able)} with {model}", remedy)
    if config.train.fp8 != "none":
        yield config.refused("train.fp8", "none with a mixture of experts", "Set train.fp8=none.")
