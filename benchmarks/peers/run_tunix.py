"""Tunix' GRPOLearner with its own sampler on the workload. Its own environment: requirements-tunix.txt, Python 3.11.

python benchmarks/peers/run_tunix.py     (float32 only: its Qwen2 takes no compute dtype apart from that of its parameters)
"""

import itertools
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
import optax
from flax import nnx
from transformers import PreTrainedTokenizerFast
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from benchmarks.peers.measuring import peak_memory_bytes
from benchmarks.workload import STEP_TOKENS, WORK, prompts, report, require, score, write_tokenizer

ROWS = WORK["prompts"] * WORK["samples_per_prompt"]
NEVER = 100_000  # a stop id that no model of this vocabulary draws: completions have their full length
STEPS = WORK["warmup_steps"] + WORK["steps"] + 1


def shape() -> qwen2.ModelConfig:
    """The workload's model in Tunix' words."""
    m = WORK["model"]
    return qwen2.ModelConfig(
        num_layers=m["num_hidden_layers"], vocab_size=m["vocab_size"], embed_dim=m["hidden_size"], hidden_dim=m["intermediate_size"],
        num_heads=m["num_attention_heads"], num_kv_heads=m["num_key_value_heads"], head_dim=m["hidden_size"] // m["num_attention_heads"],
        rope_theta=int(m["rope_theta"]), norm_eps=1e-6, use_tied_embedding=m["tie_word_embeddings"],
    )  # fmt: skip


def cluster_config(mesh: jax.sharding.Mesh) -> rl_cluster.ClusterConfig:
    """Everything on one mesh; one optimizer step per batch of completions."""
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(WORK["learning_rate"]), eval_every_n_steps=10 * STEPS, max_steps=STEPS,
        mini_batch_size=WORK["prompts"], train_micro_batch_size=WORK["prompts"],
    )  # fmt: skip
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=WORK["response_tokens"], max_prompt_length=WORK["prompt_tokens"], temperature=WORK["temperature"],
        top_p=1.0, kv_cache_size=2 * (WORK["prompt_tokens"] + WORK["response_tokens"]), eos_tokens=[NEVER],
    )  # fmt: skip
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    return rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine="vanilla", training_config=training, rollout_config=rollout
    )


class Cluster(rl_cluster.RLCluster):
    """Looks at what is sampled, and at the reference's log-probs."""

    samplings = references = 0

    def generate(self, *arguments: Any, **named: Any) -> base_rollout.RolloutOutput:
        """Called by the learner, once per step."""
        made = super().generate(*arguments, **named)
        require("tokens of the completions", [len(tokens) for tokens in made.tokens], [WORK["response_tokens"]] * ROWS)
        require("tokens of the prompts", made.left_padded_prompt_tokens.shape, (ROWS, WORK["prompt_tokens"]))
        self.samplings += 1
        return made

    def get_ref_per_token_logps(self, *arguments: Any, **named: Any) -> jax.Array:
        """Called by the learner, once per step."""
        logps_BT = super().get_ref_per_token_logps(*arguments, **named)
        require("reference's log-probs", logps_BT.shape, (ROWS, WORK["response_tokens"]))
        self.references += 1
        return logps_BT


def main() -> None:
    """Trains, prints. A step lasts from one call of the reward to the next."""
    logging.disable(logging.WARNING)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        actor, reference = (qwen2.Qwen2(shape(), rngs=nnx.Rngs(0)) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    calls_s: list[float] = []

    def rewards(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        calls_s.append(time.perf_counter())
        return [score(text, None) for text in completions]

    cluster = Cluster(actor=actor, reference=reference, tokenizer=tokenizer, cluster_config=cluster_config(mesh))
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster, reward_fns=rewards,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=WORK["samples_per_prompt"], num_iterations=1, beta=WORK["kl_coefficient"], epsilon=WORK["clip_low"]
        ),
    )  # fmt: skip
    learner.train([{"prompts": np.array(prompts())} for _ in range(STEPS)])
    done = cluster.samplings, cluster.references, cluster.actor_trainer.train_steps
    require("samplings, passes of the reference, updates", done, (STEPS, STEPS, STEPS))
    step_s = [end - start for start, end in itertools.pairwise(calls_s)][-WORK["steps"] :]
    report("tunix", "float32", STEP_TOKENS, step_s, ("google-tunix", "jax", "flax"), peak_memory_bytes=peak_memory_bytes())


if __name__ == "__main__":
    main()
