"""Real vLLM workers against the trainer's own model: the same weights, the same numbers, whatever happens to the workers."""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special
from factories import make_prompt, random_params, tiny_config, tiny_model
from full_forward import response_log_probs, response_logits
from ml_collections import ConfigDict

from jaxprorl.errors import EngineError, SharedMemoryError
from jaxprorl.models.hf.config import config_json
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.rollout import segments
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.records import Record, Swap
from jaxprorl.rollout.swap import Stage
from jaxprorl.rollout.vllm_engine import VllmEngine, draw_seed
from jaxprorl.sharding.mesh import make_mesh, param_shardings
from jaxprorl.types import Completion, Prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# head_dim 32 is the least that vLLM's attention takes on CPU. Two stop ids, so that completions end in both ways.
TIED = tiny_model(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=64, max_position_embeddings=128)
UNTIED = dataclasses.replace(TIED, tie_word_embeddings=False)
STOP_IDS = (3, 9)
SAMPLING = Sampling(samples=4, temperature=1.2, seed=3, step=5)
GREEDY = Sampling(samples=1, temperature=0.0, seed=3, step=5)
FLOAT32_NATS = 1e-4  # between float32 kernels: measured 1e-5 at log-probs of -10
MARGIN = 1e-3  # of the two best logits, below which rounding may choose either
Result = dict[tuple[int, int], Completion]


def params_of(c: Qwen2Config, seed: int) -> dict[str, np.ndarray]:
    """Flat enough that samples differ, sharp enough that everything matters."""
    return {name: value * (0.6 if name.endswith("kernel") else 1.0) for name, value in random_params(c, seed).items()}


def on_devices(c: Qwen2Config, params: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return jax.device_put(params, param_shardings(c, make_mesh("fsdp"), "fsdp"))


def engine_config(python: Path, folder: Path, **vllm: Any) -> ConfigDict:
    """16 slots: more requests than these wait."""
    config = tiny_config(rollout__engine="vllm", rollout__max_prompt_tokens=72, rollout__max_response_tokens=16, cache_dir=str(folder))
    config.rollout.vllm.update({"python": str(python), **vllm})
    return config


class Rig:
    """An engine with what tests ask of it."""

    def __init__(self, config: ConfigDict, c: Qwen2Config, run: Path):
        (run / "base_model").mkdir(parents=True, exist_ok=True)
        (run / "base_model/config.json").write_text(json.dumps(config_json(c, "float32", STOP_IDS, 0, None)))
        self.c, self.run, self.notes, self.params = c, run, list[str](), dict[int, dict[str, np.ndarray]]()
        self.engine = VllmEngine(config, c, make_mesh("fsdp"), STOP_IDS, run, self.notes.append)
        self.engine.compile(on_devices(c, params_of(c, 0)), [4, 1])

    def swap(self, seed: int) -> dict[str, float]:
        """To the weights of that seed, under the next version."""
        version = len(self.params)
        self.params[version] = params_of(self.c, seed)
        return self.engine.set_weights(on_devices(self.c, self.params[version]), version)

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.engine._workers]


@contextlib.contextmanager
def opened(config: ConfigDict, c: Qwen2Config, run: Path) -> Iterator[Rig]:
    made = Rig(config, c, run)
    try:
        yield made
    finally:
        made.engine.close()
        assert left_in_shared_memory(run) == []


def left_in_shared_memory(run: Path) -> list[Path]:
    return sorted(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(run)}-*"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all engines: the first one looks into vLLM's models for ten seconds and keeps what it finds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["tied", "untied"])
def shared(request: pytest.FixtureRequest, reference_python: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    c = TIED if request.param == "tied" else UNTIED
    with opened(engine_config(reference_python, cache), c, tmp_path_factory.mktemp("run")) as made:
        made.swap(seed=0)
        yield made


@pytest.fixture(scope="module")
def pair(reference_python: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two workers, which have more requests than slots: tests may kill them."""
    config = engine_config(reference_python, cache, workers=2, max_restarts=100)
    with opened(config, TIED, tmp_path_factory.mktemp("run")) as made:
        made.swap(seed=0)
        yield made


def prompts(count: int = 10, c: Qwen2Config = TIED) -> list[Prompt]:
    """Of 1 to 72 tokens, several of them longer than two cache blocks; half share their first block."""
    random = np.random.RandomState(0)
    head = random.randint(10, c.vocab_size, 32)
    made = []
    for i in range(count):
        ids = random.randint(10, c.vocab_size, (1, 8, 31, 32, 33, 40, 64, 65, 70, 72)[i % 10])
        if i % 2 and len(ids) > 32:
            ids[:32] = head
        made.append(make_prompt(100 + i, ids))
    return made


def collect(completions: Iterator[Completion], prompts: Sequence[Prompt], samples: int) -> Result:
    """All of them, and none twice."""
    found = list(completions)
    result = {(c.prompt_id, c.sample): c for c in found}
    assert len(found) == len(result) == len(prompts) * samples
    assert result.keys() == {(p.prompt_id, n) for p in prompts for n in range(samples)}
    return result


def generate(made: Rig, sampling: Sampling = SAMPLING, count: int = 10) -> Result:
    asked = prompts(count)
    return collect(made.engine.generate(asked, sampling), asked, sampling.samples)


def tokens(result: Result) -> dict[tuple[int, int], list[int]]:
    return {key: completion.token_ids.tolist() for key, completion in result.items()}


def check_log_probs(made: Rig, result: Result, temperature: float, count: int = 10) -> None:
    """Every log-prob is that of the version which the completion says it is of."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts(count)}
    worst = 0.0
    for completion in result.values():
        ((version, first, end),) = completion.version_spans
        assert (first, end) == (0, len(completion.token_ids))
        ids = by_id[completion.prompt_id].token_ids
        expected = response_log_probs(made.c, made.params[version], ids, completion.token_ids, temperature or 1.0)
        worst = max(worst, np.abs(expected - completion.logprobs).max())
    assert worst < FLOAT32_NATS


def versions(result: Result) -> set[int]:
    return {completion.version_spans[0][0] for completion in result.values()}


@pytest.mark.parametrize("temperature", [1.2, 0.7, 0.0])
def test_log_probs_are_the_trainers(shared: Rig, temperature: float) -> None:
    result = generate(shared, dataclasses.replace(SAMPLING, temperature=temperature))
    check_log_probs(shared, result, temperature)
    assert all(completion.logprobs.dtype == np.float32 for completion in result.values())


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6)])
def test_truncated_draws_are_renormalised_over_what_is_left(shared: Rig, top_k: int, top_p: float) -> None:
    result = generate(shared, dataclasses.replace(SAMPLING, top_k=top_k, top_p=top_p))
    by_id = {prompt.prompt_id: prompt for prompt in prompts()}
    for completion in result.values():
        params = shared.params[max(shared.params)]
        logits_TV = response_logits(shared.c, params, by_id[completion.prompt_id].token_ids, completion.token_ids) / SAMPLING.temperature
        for logits_V, token, logprob in zip(logits_TV, completion.token_ids, completion.logprobs, strict=True):
            order = np.argsort(-logits_V)
            share = np.cumsum(scipy.special.softmax(logits_V[order]))
            kept = order[: top_k or int(np.searchsorted(share, top_p)) + 1]
            assert token in kept or abs(share - top_p).min() < 1e-5, "a share that rounding may move over the bound"
            if token in kept:
                expected = logits_V[token] - scipy.special.logsumexp(logits_V[kept])
                assert abs(expected - logprob) < FLOAT32_NATS or abs(share - top_p).min() < 1e-5


def test_greedy_tokens_are_the_most_likely_ones(shared: Rig) -> None:
    compared = 0
    for completion in generate(shared, GREEDY).values():
        prompt = next(prompt for prompt in prompts() if prompt.prompt_id == completion.prompt_id)
        logits_TV = response_logits(shared.c, shared.params[max(shared.params)], prompt.token_ids, completion.token_ids)
        second_T, best_T = np.sort(logits_TV, axis=1)[:, -2:].T
        clear_T = best_T - second_T > MARGIN
        np.testing.assert_array_equal(completion.token_ids[clear_T], logits_TV.argmax(axis=1)[clear_T])
        compared += int(clear_T.sum())
    assert compared > 50


def test_a_completion_ends_with_its_first_stop_id_or_at_the_limit(shared: Rig) -> None:
    result = generate(shared)
    for completion in result.values():
        stops = np.isin(completion.token_ids, STOP_IDS)
        assert completion.token_ids.dtype == np.int32
        assert not stops[:-1].any()
        assert completion.finish_reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(completion.token_ids) == 16
    assert {completion.finish_reason for completion in result.values()} == {"stop", "length"}


def test_draws_depend_on_seed_step_prompt_and_sample_alone(shared: Rig) -> None:
    first = generate(shared)
    assert tokens(generate(shared)) == tokens(first), "the prefix cache is warm now"
    few = collect(shared.engine.generate(prompts()[::-3], SAMPLING), prompts()[::-3], 4)
    assert tokens(few) == {key: value for key, value in tokens(first).items() if key in few}, "other neighbours, another order"
    for change in ({"seed": 4}, {"step": 6}):
        other = generate(shared, dataclasses.replace(SAMPLING, **change))
        assert sum(tokens(other)[key] == tokens(first)[key] for key in first) < 10
    group = [tuple(first[101, sample].token_ids) for sample in range(4)]
    assert len(set(group)) > 1


def test_what_was_asked_before_changes_no_bit(shared: Rig) -> None:
    """A validation comes between a swap and its rollout, and a run that is resumed there does not repeat it.

    Prompts that share more than a block with prompts in the cache would be prefilled in other shapes.
    """
    random = np.random.RandomState(4)
    heads = random.randint(10, 64, (6, 40))
    asked = [make_prompt(500 + i, np.concatenate([head, random.randint(10, 64, 20 + i)])) for i, head in enumerate(heads)]
    others = [make_prompt(600 + i, np.concatenate([head, random.randint(10, 64, 3 + i)])) for i, head in enumerate(heads)]

    def bits() -> dict[tuple[int, int], bytes]:
        result = collect(shared.engine.generate(asked, SAMPLING), asked, SAMPLING.samples)
        return {key: completion.token_ids.tobytes() + completion.logprobs.tobytes() for key, completion in result.items()}

    shared.swap(seed=len(shared.params))
    cold = bits()
    collect(shared.engine.generate(others, GREEDY), others, 1)
    assert bits() == cold


def test_a_swap_takes_effect_on_prompts_that_the_cache_knows(shared: Rig) -> None:
    before = generate(shared)
    facts = shared.swap(seed=len(shared.params))
    after = generate(shared)
    check_log_probs(shared, after, SAMPLING.temperature)
    assert versions(after) == {max(shared.params)} != versions(before)
    assert tokens(after) != tokens(before)
    size = sum(value.nbytes for value in shared.params[0].values())
    assert facts["bytes"] == size
    assert 0 <= facts["probe_nats"] < FLOAT32_NATS
    assert 0 < facts["time_load_s"] < facts["time_swap_s"]


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_a_swap_while_requests_wait(shared: Rig, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 requests on 16 slots: whoever ends first, each completion is made by one version in full, and none is lost."""
    monkeypatch.setitem(shared.engine._config.rollout.vllm, "swap", mode)
    old = max(shared.params)
    stream = shared.engine.generate(prompts(), SAMPLING)
    first = next(stream)
    os.kill(shared.pids()[0], signal.SIGSTOP)  # until the trainer has told it: what ends before is not a matter of speed
    threading.Timer(1.0, os.kill, (shared.pids()[0], signal.SIGCONT)).start()
    shared.swap(seed=len(shared.params))
    result = collect(iter([first, *stream]), prompts(), 4)
    check_log_probs(shared, result, SAMPLING.temperature)
    assert versions(result) == {old, old + 1}
    made_by_old = sum(completion.version_spans[0][0] == old for completion in result.values())
    assert made_by_old >= 16 if mode == "drain" else made_by_old < 16


def test_weights_that_are_not_the_trainers_fail_the_swap_loudly(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    write = shared.engine._channel.write

    def wrong(params: Any, version: int) -> None:
        write(params | {"final_norm": params["final_norm"] * 1.05}, version)

    monkeypatch.setattr(shared.engine._channel, "write", wrong)
    with pytest.raises(
        EngineError, match=r"the swap to weights \d+ failed: log-probs of rollout worker 0 are up to .* nats from the trainer's"
    ):
        shared.swap(seed=1)
    monkeypatch.undo()
    # The engine is of no more use to a run, which ends. For the tests that share it, the worker is made to start afresh.
    os.kill(shared.pids()[0], signal.SIGKILL)
    shared.swap(seed=1)
    check_log_probs(shared, generate(shared), SAMPLING.temperature)


def test_a_version_is_used_once(shared: Rig) -> None:
    """Two buffers of the same version would leave a worker the choice."""
    version = max(shared.params)
    with pytest.raises(ValueError, match=f"version {version} after version {version}"):
        shared.engine.set_weights({}, version)


def test_two_workers_answer_what_one_would(pair: Rig, reference_python: Path, cache: Path, tmp_path: Path) -> None:
    result = generate(pair)
    check_log_probs(pair, result, SAMPLING.temperature)
    assert len(set(pair.pids())) == 2
    with opened(engine_config(reference_python, cache), TIED, tmp_path) as single:
        single.swap(seed=0)
        assert tokens(generate(single)) == tokens(result)


def test_a_worker_killed_while_it_generates_loses_and_doubles_nothing(pair: Rig) -> None:
    expected = tokens(generate(pair))
    victim, other = pair.pids()
    stream = pair.engine.generate(prompts(), SAMPLING)
    first = next(stream)
    os.kill(victim, signal.SIGKILL)
    result = collect(iter([first, *stream]), prompts(), 4)
    check_log_probs(pair, result, SAMPLING.temperature)
    assert tokens(result) == expected, "asked again, a sample draws the same numbers"
    assert pair.pids()[1] == other
    assert pair.pids()[0] != victim
    assert any(f"worker 0 (process {victim}) ended with exit code -9 while serving" in note for note in pair.notes)


def test_a_worker_killed_while_it_loads_weights_gets_them_again(pair: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = pair.engine._workers[1].process
    send = victim.send

    def kill_after(record: Record) -> None:
        send(record)
        if isinstance(record, Swap):
            os.kill(victim.pid, signal.SIGKILL)

    monkeypatch.setattr(victim, "send", kill_after)
    pair.swap(seed=len(pair.params))
    assert victim.pid not in pair.pids()
    result = generate(pair)
    assert versions(result) == {max(pair.params)}
    check_log_probs(pair, result, SAMPLING.temperature)


@pytest.mark.parametrize("stage", [Stage.LOADING, Stage.PROBING])
def test_a_lost_worker_that_is_coming_back_when_new_weights_come_takes_those(pair: Rig, stage: Stage) -> None:
    """The weights that it was coming back with are gone by then: the trainer's update takes their memory."""
    os.kill(pair.pids()[1], signal.SIGKILL)
    end_s = time.monotonic() + 60
    while pair.engine._workers[1].state.stage is not stage and time.monotonic() < end_s:
        pair.engine._pump()
    assert pair.engine._workers[1].state.stage is stage
    for array in pair.engine._params.values():
        array.delete()
    pair.swap(seed=len(pair.params))
    result = generate(pair)
    assert versions(result) == {max(pair.params)}
    check_log_probs(pair, result, SAMPLING.temperature)


def test_a_worker_that_stands_still_is_replaced(pair: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pair.engine._config.rollout.vllm.deadlines, "beat_s", 2.0)
    victim = pair.pids()[0]
    stream = pair.engine.generate(prompts(), SAMPLING)
    first = next(stream)
    os.kill(victim, signal.SIGSTOP)
    result = collect(iter([first, *stream]), prompts(), 4)
    check_log_probs(pair, result, SAMPLING.temperature)
    assert any(f"process {victim}) made no engine step for" in note for note in pair.notes)
    assert not Path(f"/proc/{victim}").exists()


@pytest.mark.parametrize("stage", [Stage.LOADING, Stage.PROBING])
def test_a_worker_that_stands_still_in_a_swap_is_replaced(pair: Rig, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = pair.engine._workers[0].process
    send = victim.send

    def stop_first(record: Record) -> None:
        if pair.engine._workers[0].state.stage is stage:
            os.kill(victim.pid, signal.SIGSTOP)
        send(record)

    monkeypatch.setattr(victim, "send", stop_first)
    limits_s = pair.engine._limits_s | {stage: 1.0}
    monkeypatch.setattr(pair.engine, "_limits_s", limits_s)
    limit = threading.Timer(3.0, limits_s.update, ({stage: 300.0},))  # a busy machine must not make the new one late
    limit.start()
    pair.swap(seed=len(pair.params))
    limit.join()
    assert any(f"process {victim.pid}) still {stage} after 1 s" in note for note in pair.notes)
    assert victim.pid not in pair.pids()
    check_log_probs(pair, generate(pair), SAMPLING.temperature)


def test_too_many_losses_end_the_run(pair: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pair.engine._config.rollout.vllm, "max_restarts", pair.engine._restarts)
    victim = pair.pids()[0]
    stream = pair.engine.generate(prompts(), SAMPLING)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"process {victim}\) ended with exit code -9(?s:.*)rollout\.vllm\.max_restarts = "):
        list(stream)


def test_too_little_shared_memory_is_said_and_a_file_takes_its_place(
    reference_python: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_bytes(folder: Path, on_disk: int) -> int:
        return 1_000_000 if folder == segments.SHARED_MEMORY else on_disk

    choose = segments.choose_folder
    monkeypatch.setattr(segments, "choose_folder", partial(choose, free_bytes=partial(free_bytes, on_disk=1_000_000)))
    with pytest.raises(SharedMemoryError, match=r"of shared memory are needed, /dev/shm has 1\.0 MB free and"):
        Rig(engine_config(reference_python, cache), TIED, tmp_path)
    monkeypatch.setattr(segments, "choose_folder", partial(choose, free_bytes=partial(free_bytes, on_disk=10**9)))
    with opened(engine_config(reference_python, cache, dtype="bfloat16"), TIED, tmp_path) as made:
        assert any("files in" in note and "take its place" in note for note in made.notes)
        assert len(list((tmp_path / "tmp").iterdir())) == 3
        facts = made.swap(seed=0)
        assert facts["bytes"] == sum(value.nbytes for value in made.params[0].values()) // 2
        assert 1e-4 < facts["probe_nats"] < 0.5, "bfloat16 is less exact, and that is seen"
        assert 0 < facts["probe_mean_nats"] < 0.1
        assert len(generate(made)) == 40
        write = made.engine._channel.write
        monkeypatch.setattr(made.engine._channel, "write", lambda _, version: write(on_devices(TIED, params_of(TIED, 0)), version))
        with pytest.raises(EngineError, match="the swap to weights 1 failed"):
            made.swap(seed=1)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_worker_that_cannot_start_says_why(reference_python: Path, cache: Path, tmp_path: Path) -> None:
    made = Rig(engine_config(reference_python, cache), dataclasses.replace(TIED, num_key_value_heads=2), tmp_path)
    try:
        (tmp_path / "base_model/config.json").write_text('{"model_type": "no such model"}')
        with pytest.raises(EngineError, match=r"rollout worker 0 (?s:.*) while starting; .*worker_0\.log ends with:(?s:.*)no such model"):
            made.swap(seed=0)
        assert len(made.pids()) == 1, "and it is not tried again"
    finally:
        made.engine.close()


def test_seeds_are_different_for_different_draws() -> None:
    numbers = [(seed, step, prompt, sample) for seed in (0, 1) for step in (0, 1) for prompt in (0, 1, 2**40) for sample in (0, 1)]
    seeds = [draw_seed(Sampling(8, 1.0, seed, step), prompt, sample) for seed, step, prompt, sample in numbers]
    assert len(set(seeds)) == len(numbers)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(Sampling(8, 1.2, 3, 5), 100, 1) == draw_seed(Sampling(1, 0.7, 3, 5), 100, 1), "nothing else matters"
