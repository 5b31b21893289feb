"""Option names in verl, TRL and OpenRLHF, and the knobs that correspond to them here. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Counterpart:
    """Knobs that replace another system's option; `note` says how values translate."""

    keys: tuple[str, ...] = ()
    note: str = ""


def _to(*keys: str, note: str = "") -> Counterpart:
    return Counterpart(keys, note)


_MICRO_BATCH = _to("train.micro_batch_tokens", note="counted in tokens, not in samples")
_EPOCHS_OF_A_BATCH = _to(
    "steps.updates_per_step",
    note="samples are used once; this splits a step's samples into several optimizer steps",
)
_ALWAYS_PACKED = _to(note="samples are always packed without padding")
_SHARDED = _to(note="the optimizer's state is always sharded over data-parallel ranks")
_SAME_GPUS = _to(
    "placement", note="training and generation share all GPUs unless this section is set"
)
_TRUNCATED = _to(
    "algorithm.overlong_max_tokens",
    "algorithm.overlong_buffer_tokens",
    note="the reward is reduced near the limit; truncated responses are not masked",
)

# Last components that are ambiguous without the component before them.
_COMMON_WORDS = frozenset({"name", "path", "enable", "horizon", "logger", "strategy", "lr"})

VERL: Mapping[str, Counterpart] = {
    "data.train_files": _to("data.prompts"),
    "data.val_files": _to("data.eval_prompts"),
    "data.train_batch_size": _to("steps.prompts_per_step"),
    "data.max_prompt_length": _to("data.max_prompt_tokens"),
    "data.max_response_length": _to("rollout.max_new_tokens"),
    "data.reward_fn_key": _to("reward.function", note="one function scores all rows"),
    "actor_rollout_ref.model.path": _to("model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _to("train.recompute"),
    "actor_rollout_ref.model.use_remove_padding": _ALWAYS_PACKED,
    "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router": _to(
        "train.freeze", note="true: freeze: router"
    ),
    "actor_rollout_ref.actor.optim.lr": _to("train.learning_rate"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _to("train.warmup_steps"),
    "actor_rollout_ref.actor.optim.total_training_steps": _to("steps.num_steps"),
    "actor_rollout_ref.actor.grad_clip": _to("train.clip_grad"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": _to(
        "steps.updates_per_step", note="train_batch_size / ppo_mini_batch_size"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": _MICRO_BATCH,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _MICRO_BATCH,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _to("train.micro_batch_tokens"),
    "actor_rollout_ref.actor.use_dynamic_bsz": _ALWAYS_PACKED,
    "actor_rollout_ref.actor.ppo_epochs": _EPOCHS_OF_A_BATCH,
    "actor_rollout_ref.actor.clip_ratio": _to("algorithm.clip_low", "algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_low": _to("algorithm.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": _to("algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": _to("algorithm.dual_clip"),
    "actor_rollout_ref.actor.entropy_coeff": _to("algorithm.entropy_coef"),
    "actor_rollout_ref.actor.use_kl_loss": _to("algorithm.kl_in", note="true: kl_in: loss"),
    "actor_rollout_ref.actor.kl_loss_coef": _to("algorithm.kl_coef"),
    "actor_rollout_ref.actor.kl_loss_type": _to("algorithm.kl_estimator"),
    "actor_rollout_ref.actor.loss_agg_mode": _to("algorithm.aggregate"),
    "actor_rollout_ref.actor.strategy": _to(note="training always uses Megatron-Core"),
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": _to("train.tp"),
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": _to("train.pp"),
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": _to("train.vpp"),
    "actor_rollout_ref.actor.megatron.context_parallel_size": _to("train.cp"),
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": _to("train.ep"),
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": _to("train.etp"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _to("train.cp"),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": _to("train.optimizer_memory"),
    "actor_rollout_ref.actor.fsdp_config.param_offload": _to("train.release_weights_in_rollout"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _MICRO_BATCH,
    "actor_rollout_ref.rollout.name": _to("rollout.engine"),
    "actor_rollout_ref.rollout.n": _to("steps.samples_per_prompt"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _to("rollout.tp"),
    "actor_rollout_ref.rollout.expert_parallel_size": _to("rollout.ep"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": _to("rollout.gpu_memory_share"),
    "actor_rollout_ref.rollout.max_num_seqs": _to("rollout.max_batch"),
    "actor_rollout_ref.rollout.enforce_eager": _to("rollout.eager"),
    "actor_rollout_ref.rollout.quantization": _to("rollout.quantization"),
    "actor_rollout_ref.rollout.response_length": _to("rollout.max_new_tokens"),
    "actor_rollout_ref.rollout.val_kwargs.n": _to("eval.samples_per_prompt"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": _to("eval.temperature"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _MICRO_BATCH,
    "critic.optim.lr": _to("train.critic_learning_rate"),
    "critic.cliprange_value": _to("algorithm.value_clip"),
    "algorithm.adv_estimator": _to("algorithm.name"),
    "algorithm.lam": _to("algorithm.gae_lambda"),
    "algorithm.use_kl_in_reward": _to("algorithm.kl_in", note="true: kl_in: reward"),
    "algorithm.kl_penalty": _to("algorithm.kl_estimator"),
    "algorithm.kl_ctrl.kl_coef": _to("algorithm.kl_coef"),
    "algorithm.kl_ctrl.target_kl": _to("algorithm.kl_target"),
    "algorithm.kl_ctrl.horizon": _to("algorithm.kl_horizon"),
    "algorithm.norm_adv_by_std_in_grpo": _to("algorithm.normalize_std"),
    "algorithm.filter_groups.enable": _to("algorithm.max_resampling"),
    "custom_reward_function.path": _to("reward.function", note="'package.module:function'"),
    "custom_reward_function.name": _to("reward.function", note="'package.module:function'"),
    "reward_model.reward_manager": _to("reward.function"),
    "trainer.project_name": _to("log.wandb"),
    "trainer.experiment_name": _to("run.name"),
    "trainer.default_local_dir": _to("run.dir"),
    "trainer.total_epochs": _to("steps.num_epochs"),
    "trainer.total_training_steps": _to("steps.num_steps"),
    "trainer.save_freq": _to("checkpoint.every"),
    "trainer.test_freq": _to("steps.eval_every"),
    "trainer.max_actor_ckpt_to_keep": _to("checkpoint.keep"),
    "trainer.logger": _to("log.tensorboard", "log.wandb", "log.mlflow"),
    "trainer.resume_mode": _to(note="a run always continues from the newest checkpoint"),
    "trainer.n_gpus_per_node": _to(
        note="torchrun or `hybridrl launch` decides which GPUs are used"
    ),
    "trainer.nnodes": _to(note="torchrun or `hybridrl launch` decides which nodes are used"),
}

TRL: Mapping[str, Counterpart] = {
    "model_name_or_path": _to("model.path"),
    "dataset_name": _to("data.prompts", note="datasets:NAME:SPLIT"),
    "output_dir": _to("run.dir", "run.name"),
    "num_generations": _to("steps.samples_per_prompt"),
    "max_completion_length": _to("rollout.max_new_tokens"),
    "max_prompt_length": _to("data.max_prompt_tokens"),
    "max_length": _to("data.max_prompt_tokens", "data.max_response_tokens"),
    "per_device_train_batch_size": _MICRO_BATCH,
    "gradient_accumulation_steps": _to(
        "steps.prompts_per_step", note="micro-batches follow from train.micro_batch_tokens"
    ),
    "generation_batch_size": _to("steps.prompts_per_step", note="in prompts, not in samples"),
    "batch_size": _to("steps.prompts_per_step"),
    "train_batch_size": _to("steps.prompts_per_step"),
    "num_iterations": _EPOCHS_OF_A_BATCH,
    "learning_rate": _to("train.learning_rate"),
    "lr_scheduler_type": _to("train.lr_schedule"),
    "warmup_steps": _to("train.warmup_steps"),
    "warmup_ratio": _to("train.warmup_steps", note="counted in steps"),
    "max_grad_norm": _to("train.clip_grad"),
    "gradient_checkpointing": _to("train.recompute"),
    "bf16": _to("model.dtype", note="auto: bfloat16 on GPUs"),
    "fp16": _to("model.dtype", note="auto: bfloat16 on GPUs; float16 is not supported"),
    "num_train_epochs": _to("steps.num_epochs"),
    "max_steps": _to("steps.num_steps"),
    "save_steps": _to("checkpoint.every"),
    "save_total_limit": _to("checkpoint.keep"),
    "eval_steps": _to("steps.eval_every"),
    "logging_steps": _to(note="each step is logged"),
    "report_to": _to("log.tensorboard", "log.wandb", "log.mlflow"),
    "run_name": _to("run.name"),
    "log_completions": _to("log.rollouts_every"),
    "beta": _to("algorithm.kl_coef"),
    "epsilon": _to("algorithm.clip_low", note="clip_high is the same unless epsilon_high is set"),
    "epsilon_high": _to("algorithm.clip_high"),
    "delta": _to("algorithm.dual_clip"),
    "loss_type": _to("algorithm.aggregate", note="dr_grpo and dapo are algorithms of that name"),
    "scale_rewards": _to("algorithm.normalize_std"),
    "importance_sampling_level": _to("algorithm.objective", note="sequence: algorithm gspo"),
    "mask_truncated_completions": _TRUNCATED,
    "reward_funcs": _to("reward.function", "reward.functions"),
    "reward_weights": _to("reward.functions[NAME].weight"),
    "use_vllm": _to("rollout.engine", note="engine: vllm"),
    "vllm_mode": _SAME_GPUS,
    "vllm_gpu_memory_utilization": _to("rollout.gpu_memory_share"),
    "vllm_tensor_parallel_size": _to("rollout.tp"),
    "top_p": _to("rollout.top_p"),
    "top_k": _to("rollout.top_k"),
    "temperature": _to("rollout.temperature"),
    "packing": _ALWAYS_PACKED,
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
}

OPENRLHF: Mapping[str, Counterpart] = {
    "pretrain": _to("model.path"),
    "prompt_data": _to("data.prompts"),
    "eval_dataset": _to("data.eval_prompts"),
    "input_key": _to("data.prompt_key"),
    "output_key": _to("data.response_key"),
    "apply_chat_template": _to("data.chat_template"),
    "rollout_batch_size": _to("steps.prompts_per_step"),
    "n_samples_per_prompt": _to("steps.samples_per_prompt"),
    "micro_train_batch_size": _MICRO_BATCH,
    "micro_rollout_batch_size": _to("rollout.max_batch"),
    "max_epochs": _EPOCHS_OF_A_BATCH,
    "num_episodes": _to("steps.num_epochs"),
    "prompt_max_len": _to("data.max_prompt_tokens"),
    "generate_max_len": _to("rollout.max_new_tokens"),
    "max_len": _to("data.max_prompt_tokens", "rollout.max_new_tokens"),
    "actor_learning_rate": _to("train.learning_rate"),
    "critic_learning_rate": _to("train.critic_learning_rate"),
    "advantage_estimator": _to("algorithm.name"),
    "init_kl_coef": _to("algorithm.kl_coef"),
    "kl_estimator": _to("algorithm.kl_estimator"),
    "use_kl_loss": _to("algorithm.kl_in", note="true: kl_in: loss"),
    "eps_clip": _to("algorithm.clip_low", "algorithm.clip_high"),
    "eps_clip_low_high": _to("algorithm.clip_low", "algorithm.clip_high"),
    "value_clip": _to("algorithm.value_clip"),
    "entropy_loss_coef": _to("algorithm.entropy_coef"),
    "lambd": _to("algorithm.gae_lambda"),
    "gamma": _to("algorithm.gamma"),
    "dynamic_filtering": _to("algorithm.max_resampling"),
    "reward_pretrain": _to("reward.function", note="function: reward_model, its path in options"),
    "remote_rm_url": _to("reward.function", note="function: remote, its url in options"),
    "agent_func_path": _to("environment.name"),
    "vllm_num_engines": _to(
        note="the number of engines is the number of ranks divided by rollout.tp"
    ),
    "vllm_enable_sleep": _to(note="engines always release their memory while training runs"),
    "enforce_eager": _to("rollout.eager"),
    "colocate_all_models": _SAME_GPUS,
    "adam_offload": _to("train.optimizer_memory"),
    "zero_stage": _SHARDED,
    "packing_samples": _ALWAYS_PACKED,
    "save_path": _to("run.dir", "run.name"),
    "ckpt_path": _to("run.dir", "run.name"),
    "max_ckpt_num": _to("checkpoint.keep"),
    "use_wandb": _to("log.wandb"),
    "ring_attn_size": _to("train.cp"),
    "ds_tensor_parallel_size": _to("train.tp"),
}

OTHER_SYSTEMS: Mapping[str, Mapping[str, Counterpart]] = {
    "verl": VERL,
    "TRL": TRL,
    "OpenRLHF": OPENRLHF,
}


# Sections of verl. No similar knob is suggested for an unknown key in one of these sections.
SECTIONS_ELSEWHERE = frozenset(
    name.rsplit(".", num)[0] for name in VERL for num in range(1, name.count(".") + 1)
)


def counterpart(key: str) -> tuple[str, str, Counterpart] | None:
    """Returns system, option and our counterpart for a key; None if no option's end matches.

    Among several options, the one that shares most trailing components is returned.
    """
    best: tuple[int, int] = (0, 0)
    found: tuple[str, str, Counterpart] | None = None
    for system, names in OTHER_SYSTEMS.items():
        for name, ours in names.items():
            num_alike = _num_alike(key.split("."), name.split("."))
            rank = num_alike, -name.count(".")
            if num_alike and rank > best:
                best, found = rank, (system, name, ours)
    return found


def _num_alike(key: list[str], name: list[str]) -> int:
    """Returns how many trailing components two names share; a single common word is none."""
    num = 0
    while num < min(len(key), len(name)) and key[-1 - num] == name[-1 - num]:
        num += 1
    is_word_alone = num == 1 and len(name) > 1 and name[-1] in _COMMON_WORDS
    return 0 if is_word_alone else num
