import dataclasses
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from factories import make_prompt, random_params, tiny_config, tiny_model
from flax import nnx
from ml_collections import ConfigDict

from jaxprorl.compilation import no_compilation
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import build
from jaxprorl.packing import Sample, assign_rows, pack
from jaxprorl.rollout.cache import make_layout
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.jax_engine import JaxEngine, prefill_prompts, prompt_widths
from jaxprorl.sharding.mesh import make_mesh, replicated
from jaxprorl.types import Completion, Prompt
from jaxprorl.update import batch_log_probs

# Untied, and with token 0 as one of the stop ids: nothing but the padding of prompts ever feeds token 0 to the model.
MODEL = tiny_model(tie_word_embeddings=False)
STOP_IDS = (0, 9)
SAMPLING = Sampling(samples=4, temperature=1.2, seed=3, step=5)
GREEDY = Sampling(samples=1, temperature=0.0, seed=3, step=5)
CONFIG = tiny_config()  # 16 slots: 4 prompts x 4 samples at a time; prompts to 8 tokens, responses to 12, in chunks of 4
Result = dict[tuple[int, int], Completion]


def placed(params: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return jax.device_put(params, replicated(make_mesh("dp")))


def make_engine(config: ConfigDict = CONFIG, stop_ids: Sequence[int] = STOP_IDS, samples: Sequence[int] = (4, 1)) -> JaxEngine:
    engine = JaxEngine(config, MODEL, make_mesh("dp"), stop_ids)
    params = placed(random_params(MODEL))
    engine.compile(params, samples)
    engine.set_weights(params, 0)
    return engine


@pytest.fixture(scope="module")
def shared_engine() -> JaxEngine:
    return make_engine()


@pytest.fixture
def engine(shared_engine: JaxEngine) -> JaxEngine:
    shared_engine.set_weights(placed(random_params(MODEL)), 0)
    return shared_engine


def prompts(count: int = 10) -> list[Prompt]:
    """Prompts of one to eight tokens, in ten prompts each length."""
    random = np.random.RandomState(0)
    return [make_prompt(100 + i, random.randint(1, 48, 1 + i % 8)) for i in range(count)]


def generate(engine: JaxEngine, prompts: Sequence[Prompt], sampling: Sampling = SAMPLING) -> Result:
    completions = list(engine.generate(prompts, sampling))
    result = {(c.prompt_id, c.sample): c for c in completions}
    assert len(completions) == len(result) == len(prompts) * sampling.samples
    assert result.keys() == {(p.prompt_id, n) for p in prompts for n in range(sampling.samples)}
    return result


def tokens(result: Result) -> dict[tuple[int, int], list[int]]:
    return {key: completion.token_ids.tolist() for key, completion in result.items()}


def trainer_log_probs(
    params: dict[str, np.ndarray], prompts: Sequence[Prompt], result: Result, temperature: float
) -> dict[Any, np.ndarray]:
    """What the training step would compute for the same tokens, in packed rows."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    keys = sorted(result)
    samples = [Sample(by_id[key[0]].token_ids, result[key].token_ids) for key in keys]
    layout = assign_rows([sample.tokens for sample in samples], 48)
    rows = pack(samples, layout, len(layout), 48)
    logp_BS = np.asarray(jax.jit(partial(batch_log_probs, build(MODEL, Compute()), temperature=temperature))(params, rows)[0])
    found = {}
    for row, members in enumerate(layout):
        for segment, index in enumerate(members, start=1):
            found[keys[index]] = logp_BS[row][(rows["segment_ids"][row] == segment) & (rows["mask"][row] > 0)]
    return found


def next_logits(params: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits after each token of one sequence, by the full forward pass."""
    row, segments = np.zeros((1, 20), np.int32), np.zeros((1, 20), np.int32)
    row[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    return np.asarray(_logits(params, row, segments))[0, : len(ids)].astype(np.float64)


@jax.jit
def _logits(params: dict[str, jax.Array], row: jax.Array, segments: jax.Array) -> jax.Array:
    model: Any = nnx.merge(build(MODEL, Compute()), params)
    return model(row, jnp.arange(20)[None], segments) @ model.head().T


@pytest.mark.parametrize("temperature", [1.2, 0.7])
def test_log_probs_equal_the_trainers(engine: JaxEngine, temperature: float) -> None:
    result = generate(engine, prompts(), dataclasses.replace(SAMPLING, temperature=temperature))
    expected = trainer_log_probs(random_params(MODEL), prompts(), result, temperature)
    worst = max(np.abs(result[key].logprobs - expected[key]).max() for key in result)
    assert worst < 2e-5  # both in float32; 2e-6 when written
    assert all(completion.logprobs.dtype == np.float32 for completion in result.values())


def test_greedy_tokens_are_the_most_likely_ones_of_the_full_forward_pass(engine: JaxEngine) -> None:
    result = generate(engine, prompts(), GREEDY)
    for prompt in prompts():
        completion = result[prompt.prompt_id, 0]
        logits_SV = next_logits(random_params(MODEL), np.concatenate([prompt.token_ids, completion.token_ids]))
        logits_TV = logits_SV[len(prompt.token_ids) - 1 : -1]
        np.testing.assert_array_equal(completion.token_ids, logits_TV.argmax(axis=1))
        # Greedy log-probs are those at temperature 1.
        expected = scipy.special.log_softmax(logits_TV, axis=1)[np.arange(len(completion.token_ids)), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=2e-5)


def test_a_completion_ends_with_the_first_stop_id_or_at_the_limit(engine: JaxEngine) -> None:
    result = generate(engine, prompts(24))
    for completion in result.values():
        ids = completion.token_ids
        assert ids.dtype == np.int32 and len(ids) == len(completion.logprobs)
        assert not set(ids[:-1]) & set(STOP_IDS)
        if completion.finish_reason == "stop":
            assert ids[-1] in STOP_IDS and len(ids) <= 12
        else:
            assert completion.finish_reason == "length"
            assert ids[-1] not in STOP_IDS and len(ids) == 12
        assert completion.version_spans == ((0, 0, len(ids)),)
    reasons = [completion.finish_reason for completion in result.values()]
    assert 5 < reasons.count("stop") < 91
    assert {0, 9} <= {c.token_ids[-1] for c in result.values()}
    assert len({len(c.token_ids) for c in result.values()}) > 6


@pytest.mark.slow
def test_a_limit_that_is_no_multiple_of_the_chunk_is_kept() -> None:
    engine = make_engine(tiny_config(rollout__max_response_tokens=10), samples=[4])
    result = generate(engine, prompts(6))
    lengths = [len(c.token_ids) for c in result.values() if c.finish_reason == "length"]
    assert lengths and set(lengths) == {10}
    expected = trainer_log_probs(random_params(MODEL), prompts(6), result, SAMPLING.temperature)
    assert max(np.abs(result[key].logprobs - expected[key]).max() for key in result) < 2e-5


def test_the_same_question_twice_gives_the_same_tokens_and_log_probs_bit_for_bit(engine: JaxEngine) -> None:
    first, again = generate(engine, prompts()), generate(engine, prompts())
    assert tokens(first) == tokens(again)
    for key in first:
        np.testing.assert_array_equal(first[key].logprobs, again[key].logprobs)


def test_tokens_depend_neither_on_order_nor_on_neighbours_nor_on_their_number(engine: JaxEngine) -> None:
    together = tokens(generate(engine, prompts()))
    assert tokens(generate(engine, prompts()[::-1])) == together
    assert tokens(generate(engine, prompts()[3:5])) == {key: ids for key, ids in together.items() if key[0] in (103, 104)}
    for prompt in prompts()[:4]:
        alone = generate(engine, [prompt])
        assert tokens(alone) == {key: ids for key, ids in together.items() if key[0] == prompt.prompt_id}


def test_group_size_does_not_change_a_samples_draws(engine: JaxEngine) -> None:
    four, one = generate(engine, prompts()), generate(engine, prompts(), dataclasses.replace(SAMPLING, samples=1))
    assert all(tokens(one)[key] == tokens(four)[key] for key in one)


def test_seed_step_prompt_id_and_sample_each_change_the_draws(engine: JaxEngine) -> None:
    start = tokens(generate(engine, prompts()))
    for change in ({"seed": 4}, {"step": 6}):
        other = tokens(generate(engine, prompts(), dataclasses.replace(SAMPLING, **change)))
        assert np.mean([other[key] == start[key] for key in start]) < 0.2
    renamed = [dataclasses.replace(prompt, prompt_id=prompt.prompt_id + 1000) for prompt in prompts()]
    other = tokens(generate(engine, renamed))
    assert np.mean([other[prompt_id + 1000, n] == start[prompt_id, n] for prompt_id, n in start]) < 0.2
    assert np.mean([start[100 + i, 0] == start[100 + i, 1] for i in range(10)]) < 0.5
    # Greedy takes no draws.
    assert tokens(generate(engine, prompts(), GREEDY)) == tokens(generate(engine, prompts(), dataclasses.replace(GREEDY, seed=9, step=1)))


@pytest.mark.parametrize("temperature", [1.2, 0.7])
def test_first_and_second_tokens_are_distributed_as_the_softmax_says(engine: JaxEngine, temperature: float) -> None:
    ids = [5, 6, 7]
    many = [make_prompt(i, ids) for i in range(500)]
    result = generate(engine, many, dataclasses.replace(SAMPLING, temperature=temperature))
    drawn = np.array([completion.token_ids[0] for completion in result.values()])
    p_V = scipy.special.softmax(next_logits(random_params(MODEL), np.array(ids))[-1] / temperature)
    assert chi_square(drawn, p_V) > 1e-3
    common = int(np.argmax(np.where(np.isin(np.arange(48), STOP_IDS), 0, p_V)))
    second = np.array([c.token_ids[1] for c in result.values() if c.token_ids[0] == common])
    q_V = scipy.special.softmax(next_logits(random_params(MODEL), np.array([*ids, common]))[-1] / temperature)
    assert chi_square(second, q_V) > 1e-3
    # The test can tell: the distribution at temperature 1, or with two tokens swapped, is another one.
    other = scipy.special.softmax(next_logits(random_params(MODEL), np.array(ids))[-1])
    assert chi_square(drawn, other) < 1e-3


def chi_square(drawn: np.ndarray, p_V: np.ndarray) -> float:
    """p-value; tokens with fewer than five expected draws are taken together."""
    expected_V = p_V.astype(float) / p_V.sum() * len(drawn)
    counts_V = np.bincount(drawn, minlength=len(p_V)).astype(float)
    rare = expected_V < 5
    assert (~rare).sum() > 4
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts_V, expected_V))
    return float(scipy.stats.chisquare(counts, expected).pvalue)


def test_a_swap_takes_effect_and_is_written_on_the_completions(engine: JaxEngine) -> None:
    before = generate(engine, prompts())
    other = random_params(MODEL, seed=1)
    engine.set_weights(placed(other), 17)
    after = generate(engine, prompts())
    assert all(completion.version_spans == ((17, 0, len(completion.token_ids)),) for completion in after.values())
    assert tokens(after) != tokens(before)
    expected = trainer_log_probs(other, prompts(), after, SAMPLING.temperature)
    assert max(np.abs(after[key].logprobs - expected[key]).max() for key in after) < 2e-5
    engine.set_weights(placed(random_params(MODEL)), 18)
    assert tokens(generate(engine, prompts())) == tokens(before)


def test_what_pads_a_prompt_has_no_influence(engine: JaxEngine) -> None:
    before = generate(engine, prompts())
    params = random_params(MODEL)
    params["embed"][0] = 1e3 * np.random.RandomState(1).standard_normal(32)
    engine.set_weights(placed(params), 0)
    after = generate(engine, prompts())
    assert tokens(after) == tokens(before)
    for key in before:
        np.testing.assert_array_equal(after[key].logprobs, before[key].logprobs)


@pytest.mark.slow
def test_the_width_of_the_padding_has_no_influence(engine: JaxEngine) -> None:
    before = generate(engine, prompts())
    after = generate(make_engine(tiny_config(rollout__max_prompt_tokens=13), samples=[4]), prompts())
    assert tokens(after) == tokens(before)
    assert max(np.abs(after[key].logprobs - before[key].logprobs).max() for key in before) < 2e-5


def test_no_prompts_give_no_completions(engine: JaxEngine) -> None:
    assert list(engine.generate([], SAMPLING)) == []


def skewed_limit(prompt_id: int, sample: int) -> int:
    """Lognormal lengths with a median of 4, cut at ten times that."""
    return int(np.clip(np.round(4 * np.exp(0.9 * np.random.RandomState(10 * prompt_id + sample).standard_normal())), 1, 40))


@pytest.fixture(scope="module")
def narrow() -> JaxEngine:
    """Four slots per device, so that most samples wait for one; no stop id ends them before their limit."""
    changes = {"slots": 4 * make_mesh("dp").size, "max_response_tokens": 40, "min_response_tokens": 40, "decode_chunk_tokens": 1}
    return make_engine(tiny_config(**{f"rollout__{name}": value for name, value in changes.items()}), samples=[4])


def check_bits(engine: JaxEngine, everything: Sequence[Prompt], sampling: Sampling, limit: Callable[[int, int], int]) -> None:
    """Other orders, slots, neighbours and numbers of prompts give the same bits."""
    found: list[Result] = []
    for seed in range(3):
        order = np.random.RandomState(seed).permutation(len(everything))
        chosen = [everything[i] for i in order][: len(everything) - seed * len(everything) // 5]
        with no_compilation():
            found.append({(c.prompt_id, c.sample): c for c in engine.generate(chosen, sampling, limit)})
        assert len(found[-1]) == sampling.samples * len(chosen)
    lengths = [len(c.token_ids) for c in found[0].values()]
    assert lengths == [limit(*key) for key in found[0]] and len(set(lengths)) > 6
    for other in found[1:]:
        for key, completion in other.items():
            np.testing.assert_array_equal(completion.token_ids, found[0][key].token_ids)
            np.testing.assert_array_equal(completion.logprobs, found[0][key].logprobs)


@pytest.mark.slow
def test_arrival_order_slots_and_neighbours_change_no_bit(narrow: JaxEngine) -> None:
    check_bits(narrow, prompts(24), SAMPLING, skewed_limit)


@pytest.mark.slow
def test_nor_does_a_group_that_shards_share(narrow: JaxEngine) -> None:
    """Eight samples for four slots: alone the second device takes half of them, among others it does not."""
    engine, sampling = make_engine(narrow.config, samples=[8]), dataclasses.replace(SAMPLING, samples=8)
    alone, among = (list(engine.generate(chosen, sampling, skewed_limit)) for chosen in (prompts()[:1], prompts()))
    engine.statistics()
    assert sum(len(c.token_ids) for c in alone) > 30
    found = {(c.prompt_id, c.sample): c for c in among}
    for completion in alone:
        other = found[completion.prompt_id, completion.sample]
        np.testing.assert_array_equal(completion.token_ids, other.token_ids)
        np.testing.assert_array_equal(completion.logprobs, other.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nor_do_segments_and_the_rounds_of_prefill(dtype: str) -> None:
    """Two prompt widths, prefill in rounds, three segments of responses: neighbours decide which are used."""
    shards, changes = make_mesh("dp").size, {"max_prompt_tokens": 100, "max_response_tokens": 130, "min_response_tokens": 130}
    changes |= {"slots": 20 * shards, "decode_chunk_tokens": 10}
    config = tiny_config(model__dtype=dtype, **{f"rollout__{name}": value for name, value in changes.items()})
    layout = make_layout(config, 1, make_mesh("dp"))
    assert (prompt_widths(layout), prefill_prompts(layout, 64), len(layout.response_segments)) == ([64, 100], 16, 3)
    random = np.random.RandomState(0)
    everything = [make_prompt(i, random.randint(1, 48, 90 if i % 4 == 0 else 1 + i % 60)) for i in range(30 * shards)]
    engine = make_engine(config, samples=[1])
    check_bits(
        engine, everything, dataclasses.replace(SAMPLING, samples=1), lambda prompt_id, _: 130 if prompt_id % 9 == 0 else 1 + prompt_id % 40
    )


@pytest.mark.slow
def test_slot_counts_agree_in_log_probs(engine: JaxEngine) -> None:
    few = make_engine(tiny_config(rollout__slots=2 * make_mesh("dp").size), samples=[4])
    many, other = generate(engine, prompts(12)), generate(few, prompts(12))
    assert tokens(many) == tokens(other)  # no draw lies on the edge here: so all log-probs are of the same tokens
    assert max(np.abs(many[key].logprobs - other[key].logprobs).max() for key in many) < 1e-5


@pytest.mark.slow
def test_skewed_lengths_keep_the_slots_busy_and_samples_leave_as_they_end(narrow: JaxEngine) -> None:
    narrow.statistics()
    with no_compilation():
        completions = list(narrow.generate([make_prompt(i) for i in range(128)], SAMPLING, skewed_limit))
    assert len(completions) == 512 and max(len(c.token_ids) for c in completions) == 40
    use = narrow.statistics()["slot_use"]
    print(f"slot use: {use:.3f}")
    assert 0.85 <= use <= 1
    assert narrow.statistics() == {"slot_use": 1.0}  # nothing since
    assert len(completions[0].token_ids) == min(skewed_limit(i, n) for i in range(2) for n in range(4))  # the shortest of the first ones


@pytest.mark.slow
def test_truncated_sampling_and_minimum_length() -> None:
    config = tiny_config(rollout__min_response_tokens=5)
    config.evaluation.top_p = 0.9
    engine = make_engine(config, samples=[1])
    greedy = generate(engine, prompts(), GREEDY)
    assert min(len(c.token_ids) for c in greedy.values()) >= 5
    only_best = generate(engine, prompts(), Sampling(1, 1.0, 3, 5, top_k=1))
    for key, completion in only_best.items():  # as greedy, but certain
        np.testing.assert_array_equal(completion.token_ids[:4], greedy[key].token_ids[:4])
    wide = generate(engine, prompts(), Sampling(1, 1.0, 3, 5))
    assert tokens(generate(engine, prompts(), Sampling(1, 1.0, 3, 5, top_p=1 - 1e-7, top_k=0))) == tokens(wide)
    narrowed = generate(engine, prompts(), Sampling(1, 1.0, 3, 5, top_p=0.5))
    full = trainer_log_probs(random_params(MODEL), prompts(), narrowed, 1.0)
    gains = np.concatenate([(completion.logprobs - full[key])[5:] for key, completion in narrowed.items()])
    # Of the half of the mass that is left: larger by at most ln 2, and never smaller.
    assert gains.size > 10 and gains.min() > -2e-5 and gains.max() < np.log(2) + 2e-5 and gains.mean() > 0.05


def test_the_caches_memory_is_known_and_free_between_calls(engine: JaxEngine) -> None:
    list(engine.generate(prompts(2), SAMPLING))
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    stream = engine.generate(prompts(2), SAMPLING)
    cache = sum(x.nbytes for x in jax.tree.leaves(engine._executables[4].empty()[0]["layers"]))
    assert engine.cache_bytes(4) == cache
    made = engine._executables[4]
    held = [made.decode[False].memory_analysis(), *(each.memory_analysis() for each in made.prefill.values())]
    assert engine.temporary_bytes(4) == max(each.temp_size_in_bytes for each in held) > 0
    assert sum(x.nbytes for x in jax.live_arrays()) - before > cache
    list(stream)
    del stream
    gc.collect()
    assert sum(x.nbytes for x in jax.live_arrays()) <= before


def test_two_streams_at_once_do_not_disturb_each_other(engine: JaxEngine) -> None:
    alone, exam = generate(engine, prompts()), generate(engine, prompts(), GREEDY)
    stream = engine.generate(prompts(), SAMPLING)
    first = next(stream)
    assert tokens(generate(engine, prompts(), GREEDY)) == tokens(exam)
    together = {(c.prompt_id, c.sample): c for c in [first, *stream]}
    assert tokens(together) == tokens(alone)


def test_weights_that_overflow_leave_nothing_behind(engine: JaxEngine) -> None:
    before, broken = generate(engine, prompts()), random_params(MODEL)
    broken["up_kernel"][:] = np.nan
    engine.set_weights(placed(broken), 1)
    assert all(np.isnan(c.logprobs).any() for c in generate(engine, prompts()).values())
    engine.set_weights(placed(random_params(MODEL)), 2)
    after = generate(engine, prompts())
    assert tokens(after) == tokens(before)


def test_samples_that_overflow_do_not_reach_those_that_follow_in_their_slot(engine: JaxEngine) -> None:
    """Tokens 5 to 24 have a value beyond float32, which lies in the slot's columns, or the prompt's, when the next sample comes."""
    params = random_params(MODEL)
    params["embed"][:, 0], params["embed"][5:25] = 0, 0
    params["embed"][5:25, 0], params["attention_norm"][0, 0], params["v_kernel"][0, 0] = 1, 5, 3e38
    params["q_bias"][:], params["k_bias"][:] = 0, 0
    engine.set_weights(placed(params), 1)
    line = [make_prompt(i, [25 + i, 30] if i % 5 else [7] * 8) for i in range(1, 25)]
    together, overflowed = generate(engine, line), 0
    for completion in together.values():
        fed = [*line[completion.prompt_id - 1].token_ids, *completion.token_ids[:-1]]
        own = any(5 <= token < 25 for token in fed)
        assert np.isfinite(completion.logprobs).all() == (not own), completion
        overflowed += own
    assert 0.2 < overflowed / len(together) < 0.9
    for prompt in line:
        for key, completion in generate(engine, [prompt]).items():
            np.testing.assert_array_equal(completion.token_ids, together[key].token_ids)
            np.testing.assert_array_equal(completion.logprobs, together[key].logprobs)


def test_a_limit_beyond_the_cache_is_the_configs(engine: JaxEngine) -> None:
    lengths = [len(c.token_ids) for c in engine.generate(prompts(), SAMPLING, lambda *_: 30)]
    assert max(lengths) == 12
    assert {len(c.token_ids) for c in engine.generate(prompts(), SAMPLING, lambda *_: 0)} == {1}
