"""The supervised warm start: makes the base model of runs that have no `model.path`.

Phase 1 teaches the skill from clean worked solutions until every task passes a gate on validation items. Phase 2 mixes in
careless demonstrations (no work, wrong answer) for a few updates. The model then knows how to solve the tasks but seldom
shows its work, so that RL has something to find: most of its gain is a change of habit.
No decision reads a clock; the gate counts updates.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.data.prompts import encode_text
from jaxprorl.data.splits import Items, load_splits
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import ConfigError, GraderError
from jaxprorl.evaluation.harness import evaluate, first_per_task
from jaxprorl.files import TakenError, new_folder
from jaxprorl.interrupts import safe_point
from jaxprorl.models import hf
from jaxprorl.models.compute import automatic_compute
from jaxprorl.models.logprobs import token_log_probs
from jaxprorl.models.qwen2 import Params, Qwen2Config, build, init_params, parameter_count
from jaxprorl.packing import Sample, pack
from jaxprorl.rewards.pool import GraderPool, require_graded
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.jax_engine import JaxEngine
from jaxprorl.run_lock import turn
from jaxprorl.sharding.mesh import batch_sharding, like_params, moment_shardings, param_shardings, replicated
from jaxprorl.types import Prompt
from jaxprorl.warmstart import solutions
from jaxprorl.warmstart.fields import start_fields
from jaxprorl.warmstart.tokenizer import build_tokenizer

GATE_REWARD = "jaxprorl.rewards.puzzles:exact"
UPDATES_PER_DISPATCH = 50
MAX_CARELESS_SHARE = 0.95
MIN_TASK_WEIGHT = 0.15  # a solved task is still practised
Rows = dict[str, jax.Array]
Demonstrations = dict[str, list[Sample]]  # by task
Report = Callable[..., None]  # progress.phase
Check = Callable[[int], dict[str, Any]]  # seed -> solve_summary of the validation items


def fingerprint(config: ConfigDict) -> str:
    """12 hex digits over everything that the base model depends on, this package's warm-start sources included."""
    parts = start_fields(config.to_dict())
    package = Path(__file__).parents[1]
    sources = [
        package / "packing.py",
        *(file for room in ("warmstart", "models", "data") for file in sorted((package / room).glob("*.py"))),
    ]
    parts["sources"] = [source.read_text() for source in sources]
    parts["versions"] = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "reasoning_gym")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def base_model(
    config: ConfigDict,
    items: Items,
    mesh: Mesh,
    report: Report,
    tell: Callable[[str], None],
) -> tuple[Path, bool]:
    """The Hugging Face folder of the base model, made now unless the cache holds it, or another process puts it there.

    Args:
        items: the reasoning-gym items of `config.data.tasks`; demonstrations come from train, gates look at validation.
        tell: told that another process makes the same model, and is waited for.

    Returns:
        The folder, with `warm_start.json` inside, and whether it came from the cache.

    Raises:
        ConfigError: the cache cannot be written.
    """
    folder = cached_folder(config)
    if is_made(folder):
        return folder, True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(config, error) from error
    lock = folder.with_name(f"{folder.name}.lock")
    with turn(lock, lambda who: tell(f"warm start: {who} makes this base model ({folder}); waiting for it")):
        if is_made(folder):
            return folder, True
        return folder, not make(config, folder, items, mesh, report)


def is_made(folder: Path) -> bool:
    """Whether the folder holds a base model."""
    return os.path.isfile(folder / "config.json")  # Path's raises for a name that is too long


def make(config: ConfigDict, folder: Path, items: Items, mesh: Mesh, report: Report) -> bool:
    """Makes the base model. False: another process put the same one there first, as may happen where the cache has no locks."""
    shutil.rmtree(folder, ignore_errors=True)  # it is no model, or this would not be called
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(new_folder(folder))
        except OSError as error:
            raise unwritable(config, error) from error
        # Before anything long: the first check comes a good part of the way in.
        report("warm start: making the base model, once (the quickstart's takes about three minutes)", 0, config.warmstart.skill_updates)
        tokenizer = build_tokenizer(items.train, scratch, config.data.system_prompt)
        model_config = model_shape(config, tokenizer)
        params, facts = fit(config, model_config, tokenizer, items, mesh, report)
        texts = {"warm_start.json": json.dumps(facts, indent=2, sort_keys=True) + "\n"}
        try:
            hf.write_files(scratch, model_config, params, scratch, tokenizer.stop_ids, tokenizer.pad_id, tokenizer.bos_id, texts=texts)
            stack.close()
        except OSError as error:
            if isinstance(error, TakenError) and is_made(folder):
                return False
            raise unwritable(config, error) from error
    return True


def unwritable(config: ConfigDict, error: OSError) -> ConfigError:
    """What to say of a cache that cannot be written."""
    return ConfigError(f"cache_dir = {config.cache_dir!r}: the base model cannot be written there ({error}); choose another one")


def cached_folder(config: ConfigDict) -> Path:
    """Where the cache holds the base model, once it is made."""
    return Path(config.cache_dir) / "warmstart" / fingerprint(config)


def model_shape(config: ConfigDict, tokenizer: Tokenizer) -> Qwen2Config:
    """The model that `config.model` describes, with the tokenizer's vocabulary."""
    return Qwen2Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=config.model.hidden_size,
        intermediate_size=config.model.intermediate_size,
        num_hidden_layers=config.model.num_hidden_layers,
        num_attention_heads=config.model.num_attention_heads,
        num_key_value_heads=config.model.num_key_value_heads,
        head_dim=config.model.head_dim,
        rope_theta=config.model.rope_theta,
        max_position_embeddings=config.model.max_position_embeddings,
    )


def fit(
    config: ConfigDict, model_config: Qwen2Config, tokenizer: Tokenizer, items: Items, mesh: Mesh, report: Report
) -> tuple[Params, dict[str, Any]]:
    """Both phases. Returns the parameters and what happened, as `warm_start.json` stores it."""
    shardings = param_shardings(model_config, mesh, config.mesh.strategy)
    params = jax.jit(lambda: init_params(model_config, config.seed), out_shardings=shardings)()
    splits = load_splits(config, tokenizer, items)
    gate_prompts = first_per_task(splits.validation, config.warmstart.gate_items_per_task)
    engine = JaxEngine(config, model_config, mesh, tokenizer.stop_ids)
    engine.compile(params, [1])
    clean, careless = demonstrations(tokenizer, splits.train, config.seed)
    trainer = _Trainer(config, model_config, mesh, params)

    def check(seed: int) -> dict[str, Any]:
        engine.set_weights(trainer.params, version=seed)
        check_scores = partial(require_graded, f"warm start, update {seed}", max_error_share=config.grading.max_error_share)
        result = evaluate(engine, graders, gate_prompts, Sampling(1, 1.0, seed, step=0), check_scores)
        if result["solve_rate"] is None:  # with grading.max_error_share = 1; there is nothing to go by
            raise GraderError(f"warm start, update {seed}: {GATE_REWARD} could grade none of the {result['ungraded']} validation items")
        return result

    with GraderPool(GATE_REWARD, tokenizer.path, config.grading.workers, config.grading.timeout_s) as graders:
        history = teach_skill(config, trainer, clean, check, report)
        skill, skill_updates = history[-1]["solve_rate"], trainer.updates
        share, start = mix_in_careless(config, trainer, clean, careless, skill, check, report)
    return trainer.params, {
        "explanation": EXPLANATION,
        "tasks": sorted(clean),
        "parameters": parameter_count(model_config),
        "vocab_size": model_config.vocab_size,
        "train_items": {task: len(samples) for task, samples in clean.items()},
        "skill_updates": skill_updates,
        "skill_solve_rate": skill,
        "careless_updates": trainer.updates,
        "careless_share": share,
        "fingerprint": fingerprint(config),
        "solve_rate": start,
        "history": history,
    }


def teach_skill(config: ConfigDict, trainer: "_Trainer", clean: Demonstrations, check: Check, report: Report) -> list[dict[str, Any]]:
    """Phase 1. Returns one entry per validation check, the last of them where it ended."""
    planned, total = config.warmstart.skill_updates, config.warmstart.max_skill_updates
    history: list[dict[str, Any]] = []
    weights = dict.fromkeys(clean, 1.0)
    stream = _Stream(clean, {}, 0.0, [config.seed, 1])
    trainer.restart(skill_schedule(config))
    while trainer.updates < total:
        goal = min(total, trainer.updates + config.warmstart.gate_every_updates)
        loss = trainer.run(stream, weights, goal - trainer.updates)
        result = check(trainer.updates)
        rates = {task: row["solve_rate"] for task, row in result["per_task"].items()}
        found = {"solve_rate": result["solve_rate"], "ungraded": result["ungraded"], "per_task": rates}
        history.append({"updates": trainer.updates, "loss": loss} | found)
        ungraded = {"ungraded": result["ungraded"]} if result["ungraded"] else {}
        report("warm start: skill", trainer.updates, max(planned, trainer.updates), loss=loss, **rates, **ungraded)
        # A task of which nothing could be graded counts as not learnt.
        if trainer.updates >= planned and min(rate or 0.0 for rate in rates.values()) >= config.warmstart.gate_solve_rate:
            break
        weights = {task: max(MIN_TASK_WEIGHT, 1.0 - (rate or 0.0)) for task, rate in rates.items()}
    return history


def mix_in_careless(
    config: ConfigDict, trainer: "_Trainer", clean: Demonstrations, careless: Demonstrations, skill: float, check: Check, report: Report
) -> tuple[float, float]:
    """Phase 2, from a model that solves `skill` of the validation items.

    The solve rate follows the share of demonstrations that show their work, but training noise moves it: so it is checked, and
    the share corrected, until it is near `start_solve_rate`.

    Returns:
        The last share of careless demonstrations, and the validation solve rate.
    """
    target, skill, corrections = config.warmstart.start_solve_rate, max(skill, 1e-3), 0
    share = min(max(1.0 - target / skill, 0.0), MAX_CARELESS_SHARE)
    peak = config.warmstart.careless_learning_rate
    trainer.restart(optax.linear_schedule(peak, peak / 4, config.warmstart.careless_updates))
    while True:
        stream = _Stream(clean, careless, share, [config.seed, 2, corrections])
        updates = config.warmstart.correction_updates if corrections else config.warmstart.careless_updates
        trainer.run(stream, dict.fromkeys(clean, 1.0), updates)
        result = check(trainer.updates)
        rate, ungraded = result["solve_rate"], {"ungraded": result["ungraded"]} if result["ungraded"] else {}
        report("warm start: careless mix", trainer.updates, trainer.updates, solve_rate=rate, share=share, **ungraded)
        corrected = min(max(share + (rate - target) / skill, 0.0), MAX_CARELESS_SHARE)
        near = abs(rate - target) <= config.warmstart.start_tolerance
        if near or corrected == share or corrections == config.warmstart.max_corrections:
            return share, rate
        share, corrections = corrected, corrections + 1


EXPLANATION = (
    "The base model was made by supervised fine-tuning on demonstrations for these tasks: first clean worked solutions, then, for the "
    "last few updates, a mix in which most demonstrations are careless (no work, a wrong answer). It can solve the tasks but seldom "
    "shows its work. On these tasks the larger part of the gain that RL makes from here is therefore expected to be a change of habit, "
    "showing the work, which the curve of response tokens shows, and the smaller part fewer slips. It is no evidence of new skill, and "
    "says nothing about larger models or about other questions."
)


def demonstrations(tokenizer: Tokenizer, prompts: Sequence[Prompt], seed: int) -> tuple[Demonstrations, Demonstrations]:
    """Clean and careless demonstrations of every train prompt, by task, ready to pack."""
    answers: dict[str, list[str]] = {}
    for prompt in prompts:
        answers.setdefault(prompt.task, []).append(solutions.worked_solution(prompt.task, prompt.item["entry"])[1])
    clean: Demonstrations = {}
    careless: Demonstrations = {}
    stop = [tokenizer.stop_ids[0]]
    for prompt in prompts:
        entry = prompt.item["entry"]
        for target, text in (
            (clean, solutions.demonstration(prompt.task, entry)),
            (careless, solutions.careless(prompt.task, entry, answers[prompt.task], seed)),
        ):
            target.setdefault(prompt.task, []).append(Sample(prompt.token_ids, np.array(encode_text(tokenizer, text) + stop, np.int32)))
    return clean, careless


def skill_schedule(config: ConfigDict) -> optax.Schedule:
    """Learning rate of phase 1: linear warm-up, linear decay to a tenth over `skill_updates`, then constant until the gate opens."""
    peak, warmup, planned = config.warmstart.learning_rate, config.warmstart.warmup_updates, config.warmstart.skill_updates
    rise = optax.linear_schedule(0.0, peak, warmup)
    fall = optax.linear_schedule(peak, peak / 10, max(1, planned - warmup))
    return optax.join_schedules([rise, fall], [warmup])


class _Stream:
    """Endless demonstrations: tasks by weight, items of a task in shuffled order, careless with a fixed probability."""

    def __init__(self, clean: Demonstrations, careless: Demonstrations, share: float, seed: list[int]):
        self._clean, self._careless, self._share = clean, careless, share
        self._random = np.random.default_rng(seed)
        self._orders: dict[str, list[int]] = {task: [] for task in clean}

    def next(self, weights: dict[str, float]) -> Sample:
        tasks = sorted(weights)
        cumulative = np.cumsum([weights[task] for task in tasks])
        task = tasks[int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))]
        if not self._orders[task]:
            self._orders[task] = self._random.permutation(len(self._clean[task])).tolist()
        index = self._orders[task].pop()
        source = self._careless if self._share and self._random.random() < self._share else self._clean
        return source[task][index]


class _Trainer:
    """Supervised updates, several per dispatch. Each batch is filled with whole demonstrations until the next does not fit."""

    def __init__(self, config: ConfigDict, model_config: Qwen2Config, mesh: Mesh, params: Params):
        self.params, self.updates = params, 0
        self._config, self._mesh = config, mesh
        self._held: Sample | None = None  # did not fit into the last batch
        self._graphdef = build(model_config, automatic_compute(config, model_config.head_dim, "warmstart", mesh))
        self._shardings = param_shardings(model_config, mesh, config.mesh.strategy)
        self._moments = moment_shardings(model_config, mesh, config.mesh.strategy)

    def restart(self, schedule: optax.Schedule) -> None:
        """A fresh optimizer; updates count from 0."""
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.01))
        state = jax.eval_shape(self._optimizer.init, self.params)
        shardings = like_params(state, self.params, self._moments, self._mesh)
        self._opt_state = jax.jit(self._optimizer.init, out_shardings=shardings)(self.params)
        out_shardings = (self._shardings, shardings, replicated(self._mesh))
        self._step = jax.jit(self._updates, donate_argnums=(0, 1), out_shardings=out_shardings)
        self.updates = 0

    def run(self, stream: _Stream, weights: dict[str, float], updates: int) -> float:
        """Makes `updates` updates; returns the mean loss of the last dispatch."""
        loss = 0.0
        for start in range(0, updates, UPDATES_PER_DISPATCH):
            safe_point()
            batches = [self._fill(stream, weights) for _ in range(min(UPDATES_PER_DISPATCH, updates - start))]
            rows = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
            self.params, self._opt_state, losses = self._step(
                self.params, self._opt_state, jax.device_put(rows, batch_sharding(self._mesh, 1))
            )
            self.updates += len(batches)
            loss = losses
        return float(np.mean(jax.device_get(loss)))

    def _fill(self, stream: _Stream, weights: dict[str, float]) -> dict[str, np.ndarray]:
        """One batch of rows, first-fit as they come."""
        rows, row_tokens = self._config.warmstart.rows, self._config.warmstart.row_tokens
        samples: list[Sample] = []
        layout: list[list[int]] = [[] for _ in range(rows)]
        free = [row_tokens] * rows
        while True:
            sample = self._held or stream.next(weights)
            self._held = None
            row = next((r for r, space in enumerate(free) if space >= sample.tokens), None)
            if row is None:
                self._held = sample
                return pack(samples, layout, rows, row_tokens)
            layout[row].append(len(samples))
            free[row] -= sample.tokens
            samples.append(sample)

    def _updates(self, params: Params, opt_state: optax.OptState, rows: Rows) -> tuple[Params, optax.OptState, jax.Array]:
        def loss_of(params: Params, rows: Rows) -> jax.Array:
            model: Any = nnx.merge(self._graphdef, params)
            hidden_BSD = model(rows["tokens"], rows["positions"], rows["segment_ids"])
            logp_BS, _ = token_log_probs(
                hidden_BSD, model.head(), rows["targets"], 1.0, rows["mask"], model.compute.mesh, model.compute.table
            )
            return -(logp_BS * rows["mask"]).sum() / rows["mask"].sum()

        def update(carry: tuple[Params, optax.OptState], rows: Rows) -> tuple[tuple[Params, optax.OptState], jax.Array]:
            params, opt_state = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, rows)
            changes, opt_state = self._optimizer.update(gradients, opt_state, params)
            return (optax.apply_updates(params, changes), opt_state), loss

        (params, opt_state), losses = jax.lax.scan(update, (params, opt_state), rows)
        return params, opt_state, losses
