"""Every field that exists, with its unit and why it is there. An experiment edits a copy of this; nothing else adds fields.

Each value here is a default that is small enough to run anywhere; `quickstart.py` is the worked example.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


def stage(
    name: str,
    steps: int,  # it ends after so many; with another `end`, at the latest
    changes: Mapping[str, Any] | None = None,  # dotted field -> its value from this stage on
    reset_reference: bool = False,  # at its start the reference becomes the policy
    reset_optimizer: str = "none",  # and what of the optimizer starts afresh, as in resets.optimizer
    end: str = "steps",  # "steps", "plateau" (validation is flat, or falls; not if resets.blind) or "manual" (launch/reset.py --next-stage)
    patience: int = 3,  # of "plateau": validations in each of the two blocks that are compared
    min_change: float = 0.05,  # solve rate: a plateau is when the whole interval of the gain lies below this
    confidence: float = 0.95,  # of that interval
) -> dict[str, Any]:
    """One of `stages`, in order (docs/stages.md)."""
    return {
        "name": name, "steps": steps, "changes": dict(changes or {}), "reset_reference": reset_reference,
        "reset_optimizer": reset_optimizer, "end": end, "patience": patience, "min_change": min_change, "confidence": confidence,
    }  # fmt: skip


def get_config() -> ConfigDict:
    """The base config (unlocked, so that an experiment's file can fill `data.tasks`)."""
    c = ConfigDict()
    c.run_name = "base"  # the run lives in runs_dir/run_name
    c.runs_dir = "runs"  # folder of all runs
    c.cache_dir = ".cache"  # executables, base models (made again if deleted); rewards and questions from Python, which their runs need
    c.seed = 0  # warm start, prompt order and sampling; the data has seeds of its own
    c.steps = 100  # RL length at most: one step = one rollout batch and its `batch.updates` updates; also over when its last stage ends
    c.stages = ()  # what changes on the way, in order, each made by `stage` above (docs/stages.md); () = the whole run is one
    c.on_existing = "resume"  # run folder exists already: "resume" = go on from its last checkpoint; "replace" = move it aside, start over
    c.profile_steps = ()  # steps whose jax.profiler traces go to RUN/profiles; such a step waits for its own update. () = none

    # A run also ends at the first step boundary at which one of these is used up: it is then matched to others within one step. 0 = none.
    c.budget = ConfigDict()
    c.budget.completion_tokens = 0  # sampled tokens, those of periodic validations included
    c.budget.updates = 0  # optimizer updates, skipped ones included
    c.budget.prompts = 0  # places of the prompt order

    # The policy. `path` names a Hugging Face folder; empty = the warm-start model of the shape below is made first (and cached).
    c.model = ConfigDict()
    c.model.path = ""  # Hugging Face folder (config.json, safetensors, tokenizer); empty = warm start
    c.model.hidden_size = 96  # embed width
    c.model.intermediate_size = 288  # SwiGLU width
    c.model.num_hidden_layers = 3  # decoder blocks
    c.model.num_attention_heads = 3  # query heads
    c.model.num_key_value_heads = 1  # grouped-query attention
    c.model.head_dim = 32  # >= 32, so that vLLM's CPU attention takes the same checkpoint
    c.model.rope_theta = 10000.0  # base of the rotary embedding; Qwen2 uses 1e6 for its long contexts
    c.model.max_position_embeddings = 512  # longest context, tokens
    c.model.reference_dtype = "float32"  # of the reference policy's copy: "bfloat16" halves it
    c.model.dtype = "float32"  # compute dtype: "float32" or "bfloat16"; parameters and optimizer stay float32
    c.model.attention = "auto"  # "naive", "chunked", "triton", "splash" or "cudnn"; "auto" = by devices and shapes (docs/attention.md)
    c.model.attention_chunk_tokens = 128  # of "chunked": queries and keys at a time; its memory grows with it
    c.model.remat = "none"  # "none", "dots", "attention" or "full": what a layer computes again to save memory (docs/attention.md)

    # Prompts. Splits come from seed ranges far apart (neighbouring reasoning-gym seeds share items) and are compared by hash at start.
    c.data = ConfigDict()
    c.data.source = "reasoning_gym"  # "reasoning_gym" or "jsonl:PATH" (objects with prompt, answer, optional split, task)
    c.data.tasks = ConfigDict()  # reasoning-gym task name -> its generator's arguments
    c.data.train_per_task = 2000  # different questions per task (fewer if the task cannot make so many)
    c.data.validation_per_task = 200  # gates, weights and the periodic validation
    c.data.held_out_per_task = 400  # before and after only
    c.data.train_seed = 1_000_000  # first seed of each split; item i of a split uses seed + i
    c.data.validation_seed = 3_000_000  # as above; the ranges must not meet, which is checked
    c.data.held_out_seed = 5_000_000  # as above
    c.data.mix = ()  # domains (jaxprorl/data/domains.py) and tasks that training draws from; () = all. Evaluation always takes all
    c.data.system_prompt = ""  # system message of the chat template; empty = none
    c.data.control_tokens_in_text = "text"  # `<|im_end|>` in a message: "text" = its letters, "allow" = the token (docs/tokenizers.md)
    c.data.on_conflicting_answers = "error"  # two lines ask the same, and answers or fields differ; "warn" = keep the first, say so
    c.data.overlong_prompts = "error"  # longer than rollout.max_prompt_tokens; "drop" = left out, counted and listed

    # Supervised warm start: the base model of runs without `model.path` (see jaxprorl/warmstart).
    c.warmstart = ConfigDict()
    c.warmstart.rows = 8  # packed rows per update
    c.warmstart.row_tokens = 96  # packed row length
    c.warmstart.learning_rate = 3e-3  # AdamW; after the warm-up it falls linearly to a tenth over `skill_updates`
    c.warmstart.warmup_updates = 50  # linear rise of the learning rate
    c.warmstart.skill_updates = 3200  # phase 1, clean worked solutions
    c.warmstart.max_skill_updates = 4800  # phase 1 goes on to here at most while the gate stays shut
    c.warmstart.gate_every_updates = 400  # validation check, also sets task weights
    c.warmstart.gate_items_per_task = 100  # validation items sampled per check
    c.warmstart.gate_solve_rate = 0.65  # phase 1 ends, once planned to, when every task reaches this at T = 1
    c.warmstart.careless_updates = 80  # phase 2, careless answers mixed in
    c.warmstart.start_solve_rate = 0.27  # where phase 2 should leave the validation solve rate; sets the share of careless demonstrations
    c.warmstart.start_tolerance = 0.04  # phase 2 goes on with a corrected share, `correction_updates` at a time, until it is this close
    c.warmstart.correction_updates = 20  # updates with each corrected share
    c.warmstart.max_corrections = 8  # corrections at most; then the start is what it is
    c.warmstart.careless_learning_rate = 1e-3  # falls linearly to a tenth

    # Rollouts.
    c.rollout = ConfigDict()
    c.rollout.engine = "jax"  # "jax" = in this process, on its devices; "vllm" = worker processes (docs/rollouts.md)
    c.rollout.samples_per_prompt = 8  # n, group size (ProRL: 16)
    c.rollout.temperature = 1.2  # ProRL section 3.2; log-probs are taken at this temperature everywhere
    c.rollout.max_prompt_tokens = 24  # longer prompts are refused, or dropped, by data.overlong_prompts
    c.rollout.max_response_tokens = 48  # a completion that reaches it without a stop id finishes as `length`
    c.rollout.min_response_tokens = 0  # no stop id is drawn before so many tokens; log-probs are the policy's; "jax" only
    c.rollout.slots = 256  # completions decoded together; a free one takes the next sample. They and the limits decide the cache's memory
    c.rollout.max_staleness = 0  # weight swaps that a group may lag behind when trained on; 0 = on-policy: one without room is discarded
    c.rollout.decode_chunk_tokens = 12  # decode steps per dispatch; finished samples reach the graders between dispatches

    # Workers of rollout.engine = "vllm"; sizes and failures are in docs/rollouts.md.
    c.rollout.vllm = ConfigDict()
    c.rollout.vllm.python = ".venv-vllm/bin/python"  # interpreter that has vLLM; `bash launch/install_vllm.sh` makes this one
    c.rollout.vllm.workers = 1  # processes with an engine each; they share rollout.slots and the prompts of a batch
    c.rollout.vllm.devices = ()  # CUDA_VISIBLE_DEVICES of each worker, e.g. ("0", "1"); empty = as the trainer's
    c.rollout.vllm.threads = 1  # of each worker on CPU; more than its share of free cores makes it many times slower
    c.rollout.vllm.dtype = "float32"  # of weights (also on their way) and computation; or "bfloat16"
    c.rollout.vllm.eager = True  # False = vLLM compiles and captures the model: slower start, faster decoding on GPU
    c.rollout.vllm.block_tokens = 32  # of the cache; on CPU a multiple of 32
    c.rollout.vllm.cache_mb = 0.0  # keys and values per worker, MB; 0 = enough for every slot at full length
    c.rollout.vllm.ring_mb = 8.0  # of each of a worker's two rings; must hold a few of the longest completions (8 bytes per token)
    c.rollout.vllm.swap = "drain"  # requests under way when weights come: "drain" = they end first, "abort" = they start over after
    c.rollout.vllm.probe_tolerance_nats = 0.0  # largest difference to the trainer's log-probs after a swap; 0 = by dtype (rollout/probe.py)
    c.rollout.vllm.max_restarts = 3  # workers lost and started again while this process lives; one more ends the run
    c.rollout.vllm.deadlines = ConfigDict()  # seconds until a worker counts as lost
    c.rollout.vllm.deadlines.start_s = 600.0  # from its start to an engine that is ready
    c.rollout.vllm.deadlines.drain_s = 1800.0  # requests of the old weights end
    c.rollout.vllm.deadlines.load_s = 300.0  # reading new weights
    c.rollout.vllm.deadlines.probe_s = 120.0  # answering the probe
    c.rollout.vllm.deadlines.beat_s = 120.0  # between two engine steps while it has requests
    c.rollout.vllm.deadlines.answer_s = 1800.0  # between two finished requests while it has some

    # One rollout batch.
    c.batch = ConfigDict()
    c.batch.prompts = 32  # kept groups wanted per step (ProRL: 256)
    c.batch.max_drawn_factor = 2.0  # prompts drawn per step at most, as a multiple of `prompts`; then train on what there is
    c.batch.refill_prompts = 32  # prompts drawn per refill round; best a multiple of the prompts that fill rollout.slots
    c.batch.updates = 4  # optimizer updates per rollout batch (ProRL section 3.2: 256 / 64)
    c.batch.row_tokens = 96  # sequences are packed into rows of this length
    c.batch.packing = True  # several sequences share a row; False = one each, as "cudnn" attention needs
    c.batch.share_prompts = True  # a row holds a group's prompt once for all its samples there; only with packing and "naive" attention
    c.batch.micro_batch_rows = 16  # rows per forward-backward, all devices together; 0 = by row_tokens and devices (jaxprorl/sizes.py)

    # Objective. Every choice, with formula and source, is in docs/algorithms.md; these are ProRL v1's where the paper tells.
    c.algorithm = ConfigDict()
    c.algorithm.advantage = "grpo"  # "grpo", "dr_grpo", "rloo", "reinforce_pp_trajectory" or "reinforce_pp_token"
    c.algorithm.policy_loss = "clipped"  # "clipped" (token ratio), "gspo" (sequence ratio) or "reinforce" (ratio 1, no clip)
    c.algorithm.clip_low = 0.2  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    c.algorithm.clip_high = 0.4  # larger than clip_low, so that unlikely tokens can grow (DAPO; ProRL section 3.2)
    c.algorithm.aggregation = "token_mean"  # of a mini-batch: "token_mean", "sequence_mean" or "dr_grpo" (a constant)
    c.algorithm.kl_coefficient = 1e-4  # beta, weight of the KL to the reference; 0 = measured only
    c.algorithm.kl_estimator = "k3"  # in the loss: "k1" (its gradient is no KL's), "k2", "k3" or "k1_gradient" (k1's value, k2's gradient)
    c.algorithm.kl_placement = "loss"  # "loss", or "reward": the reward is lowered by beta * the sum of k1 over the answer
    c.algorithm.entropy_bonus = 0.0  # weight of the mean entropy in the loss (an arm; ProRL has none)
    c.algorithm.old_logp = "trainer"  # log-probs under the ratio: "trainer" = its own before the first update; "engine" = as sampled
    c.algorithm.correction = "off"  # of engine against trainer: "off", "truncated", "icepop" or "geometric_mask"
    c.algorithm.correction_low = 0.5  # lower bound of the ratio trainer / engine, for "icepop" and "geometric_mask"
    c.algorithm.correction_high = 5.0  # upper bound, for all three

    # Dynamic sampling: which groups carry a signal. The others are dropped and, up to a cap, replaced.
    c.filtering = ConfigDict()
    c.filtering.rule = "spread"  # "spread": rewards differ by more than `tolerance`; "accuracy": some solved, not all; "off": keep all
    c.filtering.rules = ConfigDict()  # domain -> rule, where it differs
    c.filtering.tolerance = 1e-6  # rewards that lie within it are equal

    # Length and stopping: what is done to rewards before the advantages. Sizes marked unknown are in no paper.
    c.shaping = ConfigDict()
    c.shaping.stopping = "off"  # answers that do not stop: "off", "overlong" (DAPO), "non_termination" (ProRL v1) or "stop_properly" (DLER)
    c.shaping.penalty = 1.0  # of "overlong" (DAPO: 1, at max_response_tokens) and "non_termination" (unknown), in units of reward
    c.shaping.buffer_tokens = 1  # of "overlong": the penalty grows linearly over the last so many tokens before max_response_tokens
    c.shaping.coefficient = 0.0  # of "stop_properly": what remains of the reward (DLER: 0)
    c.shaping.cosine_weight = 0.0  # of a term that falls with the length along a cosine (ProRL v2; unknown); 0 = off
    c.shaping.cosine_minimum = 0.0  # the term at max_response_tokens (unknown)
    c.shaping.cosine_maximum = 1.0  # the term at length 0 (unknown)
    c.shaping.cosine_on_steps = 100  # the term is on for so many steps ...
    c.shaping.cosine_off_steps = 500  # ... and off for so many, again and again; 0 = always on

    c.optimizer = ConfigDict()  # AdamW; the paper gives only the learning rate (2e-6 at 1.5B)
    c.optimizer.learning_rate = 2e-6  # after the warm-up (ProRL section 3.2)
    c.optimizer.schedule = "constant"  # "constant" (ProRL), or "cosine" down to final_share at update cosine_updates
    c.optimizer.warmup_updates = 0  # linear, from the start and again after a reset of "all"
    c.optimizer.cosine_updates = 0  # length of the cosine in updates, warm-up counted in; it starts again with it
    c.optimizer.final_share = 0.1  # of the learning rate, at the cosine's end
    c.optimizer.b1 = 0.9  # decay of the first moment
    c.optimizer.b2 = 0.95  # of the second; shorter than AdamW's 0.999, as usual for language models
    c.optimizer.eps = 1e-8  # AdamW's usual
    c.optimizer.weight_decay = 0.0  # decoupled, times the learning rate; 0 = none
    c.optimizer.decay_vectors = False  # decay norm scales and biases too
    c.optimizer.clip_norm = 1.0  # global gradient norm
    c.optimizer.max_skipped_updates = 8  # so many updates in a row with a non-finite gradient or change (each is skipped) stop the run

    c.resets = ConfigDict()  # when, and what; any of the triggers is enough, fields and statistics are in docs/resets-when.md
    c.resets.reference = True  # the reference becomes the policy; False = it is left as it is
    c.resets.optimizer = "all"  # (ProRL v1), "moments_and_bias", "moments" or "none" (v2): what starts afresh, see docs/resets.md
    c.resets.warmup_updates = 0  # linear, from every reset on, whatever it resets (no paper has one); 0 = none
    c.resets.every_steps = 0  # a reset after every so many steps; 0 = never
    c.resets.at_steps = ()  # and right before each of these steps (counted from 0)
    c.resets.manual = True  # and when launch/reset.py says so; the event tells that a person did
    c.resets.blind = True  # no trigger may see validation results: the controller is built without a way in for them
    c.resets.cooldown_steps = 0  # from one reset to the next at least; a person's command is not held back
    c.resets.max_resets = 0  # of the run, nor by this; 0 = no limit
    c.resets.kl_spike = ConfigDict()  # KL to the reference jumps
    c.resets.kl_spike.on = False  # use it
    c.resets.kl_spike.metric = "kl.k3_median"  # or "kl.k1", which is unbiased and may be negative
    c.resets.kl_spike.window = 30  # steps of the baseline; a reset empties it (false alarms by window and z: docs/resets-when.md)
    c.resets.kl_spike.z = 6.0  # (x - median) / (1.4826 MAD) over the baseline above which it fires; 0 = not asked
    c.resets.kl_spike.above = 0.0  # nats/token above which it fires; 0 = not asked
    c.resets.kl_spike.both = False  # both must hold, not either
    c.resets.entropy_collapse = ConfigDict()  # the policy is no longer undecided
    c.resets.entropy_collapse.on = False  # use it
    c.resets.entropy_collapse.window = 20  # steps of the baseline
    c.resets.entropy_collapse.floor = 0.0  # nats/token below which it fires; 0 = not asked
    c.resets.entropy_collapse.fall = 0.5  # share of the baseline's median lost at which it fires; 0 = not asked
    c.resets.validation = ConfigDict()  # validation is flat, or falls; not with `blind`
    c.resets.validation.on = False  # use it
    c.resets.validation.patience = 3  # validations in each of the two blocks that are compared; a reset starts both afresh
    c.resets.validation.min_change = 0.05  # solve rate: a plateau is when the whole interval of the gain lies below this
    c.resets.validation.confidence = 0.95  # of that interval
    c.resets.validation.drop_only = False  # only when the whole interval lies below 0
    c.resets.length = ConfigDict()  # completions get long
    c.resets.length.on = False  # use it
    c.resets.length.window = 20  # steps of the baseline
    c.resets.length.factor = 2.0  # times the baseline's median of the mean length
    c.resets.repetition = ConfigDict()  # completions repeat themselves
    c.resets.repetition.on = False  # use it
    c.resets.repetition.above = 0.5  # share of repeated 4-grams
    c.resets.stop_collapse = ConfigDict()  # completions no longer end
    c.resets.stop_collapse.on = False  # use it
    c.resets.stop_collapse.below = 0.5  # share of completions with a stop token

    # Alarms. Actions: "off", "log" = an event, "reset", "pause" = save and leave with status 75, "stop" = save and end with an error.
    c.alarms = ConfigDict()
    c.alarms.kl_spike = ConfigDict()
    c.alarms.kl_spike.action = "off"  # see above
    c.alarms.kl_spike.metric = "kl.k3_median"  # or "kl.k1"
    c.alarms.kl_spike.window = 30  # steps of the baseline
    c.alarms.kl_spike.z = 6.0  # robust z-score; 0 = not asked
    c.alarms.kl_spike.above = 0.0  # nats/token; 0 = not asked
    c.alarms.entropy_collapse = ConfigDict()
    c.alarms.entropy_collapse.action = "off"  # see above
    c.alarms.entropy_collapse.floor = 0.05  # nats/token
    c.alarms.skipped_updates = ConfigDict()
    c.alarms.skipped_updates.action = "off"  # see above; optimizer.max_skipped_updates stops a run in any case
    c.alarms.skipped_updates.above = 0.0  # updates of a step whose gradient was not finite
    c.alarms.zero_spread = ConfigDict()
    c.alarms.zero_spread.action = "off"  # see above
    c.alarms.zero_spread.above = 0.9  # share of drawn groups without a signal
    c.alarms.repetition = ConfigDict()
    c.alarms.repetition.action = "off"  # see above
    c.alarms.repetition.above = 0.5  # share of repeated 4-grams
    c.alarms.unique_tokens = ConfigDict()
    c.alarms.unique_tokens.action = "off"  # see above
    c.alarms.unique_tokens.below = 0.2  # different tokens over tokens, mean over the completions; long ones have fewer
    c.alarms.grader_errors = ConfigDict()
    c.alarms.grader_errors.action = "off"  # see above; grading.max_error_share stops a run in any case
    c.alarms.grader_errors.above = 0.01  # share of samples
    c.alarms.mismatch_trend = ConfigDict()  # engine and trainer drift apart
    c.alarms.mismatch_trend.action = "off"  # see above
    c.alarms.mismatch_trend.window = 50  # steps
    c.alarms.mismatch_trend.slope = 1e-4  # nats per step, of the Theil-Sen line
    c.alarms.mismatch_trend.z = 3.0  # of the Mann-Kendall test
    c.alarms.stalled_engine = ConfigDict()  # sampling has become slow
    c.alarms.stalled_engine.action = "off"  # see above, but never "reset": it reads the clock
    c.alarms.stalled_engine.window = 20  # steps of the baseline
    c.alarms.stalled_engine.share = 0.5  # of the baseline's median of completion tokens per second, below which it rings

    # Reward: "module:function", called as function(completion_text, prompt) in a grader process; it returns a finite real number, or a
    # jaxprorl.rewards.Graded. Or a weighted sum of such names: "my_reward:score + 0.2 * my_reward:brevity" (docs/rewards.md).
    c.reward = "jaxprorl.rewards.puzzles:exact"  # 1 or 0; `:continuous` pays partial answers too
    c.grading = ConfigDict()
    c.grading.workers = 1  # grader processes
    c.grading.timeout_s = 5.0  # per completion; over it the worker is killed and the sample counts as grader_error
    c.grading.max_error_share = 0.05  # grader errors of one step, validation or evaluation over this share stop the run
    c.grading.solved_from = 1.0  # an answer is solved from this reward on, unless the reward says so itself (Graded); units of reward

    c.validation = ConfigDict()
    c.validation.every_steps = 20  # 0 = never
    c.validation.items_per_task = 50  # the first of the validation split, the same each time
    c.evaluation = ConfigDict()  # before and after, on the held-out split
    c.evaluation.temperature = 1.0  # one sample per item; greedy beside it
    c.evaluation.top_k = 0  # only so many of the likeliest tokens are drawn; 0 = all. Training always draws from all
    c.evaluation.top_p = 1.0  # of those, only the fewest that hold this share of the mass (ProRL section 3.4: 0.95 at temperature 0.6)
    c.evaluation.seed = 20  # of the sampling; the same before and after
    c.evaluation.reward = "jaxprorl.rewards.puzzles:continuous"  # rates count solved items, mean_score is the mean; empty = `reward`

    c.checkpoint = ConfigDict()
    c.checkpoint.every_steps = 10  # a killed run loses at most so many steps; the last step is always saved
    c.checkpoint.keep = 3  # newest kept
    c.checkpoint.keep_every_steps = 0  # and every one whose step this divides; 0 = none
    c.checkpoint.keep_best = 1  # and so many with the highest validation solve rate
    c.checkpoint.keep_resets = True  # and those right before a reset
    c.checkpoint.on_damage = "stop"  # the newest one is damaged: "stop", or "previous" = go on from the one before, saying so
    c.checkpoint.accept = ""  # what may differ from the run being resumed, comma-separated: fields of this file, data, tokenizer, reward
    c.checkpoint.save_within_s = 60.0  # after SIGTERM or SIGUSR1: finish the step, save and leave within this time

    c.mesh = ConfigDict()  # devices as a grid (docs/sharding.md); sizes of 0 are chosen by the strategy, which fills one axis with the rest
    c.mesh.strategy = "dp"  # table in jaxprorl/sharding/strategies.py: "dp", "fsdp", "zero1", "tp", "fsdp_tp" or "fsdp_cp"
    c.mesh.data = 0  # copies of everything; rows of a batch are split over data x fsdp
    c.mesh.fsdp = 0  # parameters, gradients and moments are split over it
    c.mesh.tensor = 0  # heads, MLP and vocabulary are split over it
    c.mesh.context = 0  # tokens of a row are split over it
    c.mesh.cpu_devices = 2  # host devices when JAX runs on CPU, which share rows and rollout.slots; 0 = by cores (jaxprorl/sizes.py)

    c.monitoring = ConfigDict()
    c.monitoring.progress = True  # live view in the terminal (plain lines when it is not a terminal)
    c.monitoring.tensorboard = True  # event files derived from metrics.jsonl
    # Types are checked with names and combinations, when all is set, and not by ConfigDict at each assignment (jaxprorl/schema.py).
    return ConfigDict(c.to_dict(), type_safe=False)
