"""What single fields of a config may hold: ranges and choices. Combinations are checked in `config`."""

from typing import Any

from ml_collections import ConfigDict

from jaxprorl.models.compute import ATTENTION, REMAT
from jaxprorl.recipe import OPTIMIZER_RESETS
from jaxprorl.sharding.strategies import STRATEGIES

POSITIVE = (
    "steps", "model.hidden_size", "model.intermediate_size", "model.num_hidden_layers", "model.num_attention_heads",
    "model.num_key_value_heads", "model.head_dim", "model.rope_theta", "model.max_position_embeddings", "model.attention_chunk_tokens",
    "data.train_per_task", "data.validation_per_task", "data.held_out_per_task",
    "warmstart.rows", "warmstart.row_tokens", "warmstart.learning_rate", "warmstart.skill_updates", "warmstart.max_skill_updates",
    "warmstart.gate_every_updates", "warmstart.gate_items_per_task", "warmstart.correction_updates", "warmstart.careless_learning_rate",
    "rollout.samples_per_prompt", "rollout.temperature", "rollout.max_prompt_tokens", "rollout.max_response_tokens", "rollout.slots",
    "rollout.decode_chunk_tokens", "rollout.vllm.workers", "rollout.vllm.threads", "rollout.vllm.block_tokens", "rollout.vllm.ring_mb",
    *(f"rollout.vllm.deadlines.{name}_s" for name in ("start", "drain", "load", "probe", "beat", "answer")),
    "batch.prompts", "batch.refill_prompts", "batch.updates", "batch.row_tokens",
    "optimizer.learning_rate", "optimizer.eps", "optimizer.clip_norm",
    "optimizer.max_skipped_updates", "algorithm.correction_high", "shaping.cosine_on_steps", "shaping.buffer_tokens",
    "grading.workers", "grading.timeout_s", "validation.items_per_task", "evaluation.temperature", "checkpoint.every_steps",
    "checkpoint.keep", "checkpoint.save_within_s",
    "resets.kl_spike.window", "resets.entropy_collapse.window", "resets.length.window", "resets.validation.patience",
    "alarms.kl_spike.window", "alarms.mismatch_trend.window", "alarms.stalled_engine.window",
)  # fmt: skip
NOT_NEGATIVE = (
    "budget.completion_tokens", "budget.updates", "budget.prompts",
    "seed", "data.train_seed", "data.validation_seed", "data.held_out_seed", "warmstart.warmup_updates", "warmstart.careless_updates",
    "warmstart.max_corrections",
    "algorithm.kl_coefficient", "algorithm.entropy_bonus", "algorithm.correction_low", "filtering.tolerance",
    "shaping.penalty", "shaping.cosine_weight",
    "shaping.cosine_off_steps", "rollout.max_staleness", "rollout.min_response_tokens", "optimizer.cosine_updates",
    "rollout.vllm.cache_mb", "rollout.vllm.probe_tolerance_nats",
    "rollout.vllm.max_restarts", "optimizer.cosine_updates", "optimizer.warmup_updates", "optimizer.weight_decay",
    "resets.every_steps", "resets.warmup_updates", "resets.cooldown_steps", "resets.max_resets", "resets.kl_spike.z",
    "resets.kl_spike.above",
    "resets.entropy_collapse.floor", "alarms.kl_spike.z", "alarms.kl_spike.above", "alarms.entropy_collapse.floor",
    "alarms.skipped_updates.above", "alarms.mismatch_trend.slope", "alarms.mismatch_trend.z",
    "batch.micro_batch_rows", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.context", "mesh.cpu_devices",
    "checkpoint.keep_every_steps", "checkpoint.keep_best", "validation.every_steps", "evaluation.top_k", "evaluation.seed",
)  # fmt: skip
SHARES = (
    "warmstart.gate_solve_rate", "warmstart.start_solve_rate", "warmstart.start_tolerance", "optimizer.b1", "optimizer.b2",
    "grading.max_error_share",
    "algorithm.clip_low", "shaping.coefficient", "optimizer.final_share",
    "resets.entropy_collapse.fall", "resets.validation.min_change", "resets.repetition.above", "resets.stop_collapse.below",
    "alarms.zero_spread.above", "alarms.repetition.above", "alarms.grader_errors.above",
    "alarms.unique_tokens.below", "alarms.stalled_engine.share",
)  # fmt: skip
KL_GAUGES = ("kl.k1", "kl.k3_median")
ALARMS = (
    "kl_spike",
    "entropy_collapse",
    "skipped_updates",
    "zero_spread",
    "repetition",
    "unique_tokens",
    "grader_errors",
    "mismatch_trend",
    "stalled_engine",
)
# Written out, because the tables of `algorithms` and `resets` take JAX; a test compares them.
CHOICES = {
    "on_existing": ("resume", "replace"),
    "data.control_tokens_in_text": ("text", "allow"),
    "data.on_conflicting_answers": ("error", "warn"),
    "data.overlong_prompts": ("error", "drop"),
    "model.dtype": ("float32", "bfloat16"),
    "model.reference_dtype": ("float32", "bfloat16"),
    "model.attention": ("auto", *ATTENTION),
    "model.remat": REMAT,
    "checkpoint.on_damage": ("stop", "previous"),
    "mesh.strategy": tuple(STRATEGIES),
    "rollout.engine": ("jax", "vllm"),
    "rollout.vllm.dtype": ("float32", "bfloat16"),
    "rollout.vllm.swap": ("drain", "abort"),
    "algorithm.advantage": ("grpo", "dr_grpo", "rloo", "reinforce_pp_trajectory", "reinforce_pp_token"),
    "algorithm.policy_loss": ("clipped", "gspo", "reinforce"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "dr_grpo"),
    "algorithm.kl_estimator": ("k1", "k2", "k3", "k1_gradient"),
    "algorithm.kl_placement": ("loss", "reward"),
    "algorithm.old_logp": ("trainer", "engine"),
    "algorithm.correction": ("off", "truncated", "icepop", "geometric_mask"),
    "filtering.rule": ("spread", "accuracy", "off"),
    "shaping.stopping": ("off", "overlong", "non_termination", "stop_properly"),
    "optimizer.schedule": ("constant", "cosine"),
    "resets.optimizer": OPTIMIZER_RESETS,
    "resets.kl_spike.metric": KL_GAUGES,
    "alarms.kl_spike.metric": KL_GAUGES,
    **{f"alarms.{name}.action": ("off", "log", "reset", "pause", "stop") for name in ALARMS},
    "alarms.stalled_engine.action": ("off", "log", "pause", "stop"),  # it reads the clock: a reset by it could not be repeated
}


def field_value(config: ConfigDict, field: str) -> Any:
    """The value of a dotted field."""
    value: Any = config
    for name in field.split("."):
        value = value[name]
    return value
