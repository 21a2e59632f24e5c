from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import QUICK_COMPILE, random_params, tiny_config, tiny_model
from ml_collections import ConfigDict

from jaxprorl.errors import ResetError
from jaxprorl.executables import compile_reset
from jaxprorl.optimizer import make_optimizer, update_count
from jaxprorl.resets.optimizer import FIELDS, OPTIMIZER_SETS, reset, reset_opt_state, what_is_reset
from jaxprorl.resets.warmup import warmup_after_resets
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.state import TrainState, abstract_state, start_state, state_shardings

M, B, S = "moments", "bias_count", "schedule_count"
KEPT, CLEARED = "kept", "cleared"
PARAMS = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "b": np.ones(3, np.float32)}


def rate(count: jax.Array) -> jax.Array:
    return 0.1 / (1 + count)


def plain_adamw() -> Any:
    return optax.adamw(rate, weight_decay=0.1, mask={"a": True, "b": False})


# Name -> optimizer, and what each of its state's arrays is, by hand: the start of its path -> meaning.
ADAM = {".count": B, ".mu": M, ".nu": M}
CASES: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "adamw": (plain_adamw, {"[0].count": B, "[0].mu": M, "[0].nu": M, "[2].count": S}),
    "adam_bfloat16_mean": (lambda: optax.adam(0.1, mu_dtype="bfloat16"), {"[0].count": B, "[0].mu": M, "[0].nu": M}),
    "amsgrad": (lambda: optax.amsgrad(rate), {"[0].count": B, "[0].mu": M, "[0].nu": M, "[0].nu_max": M, "[1].count": S}),
    "sgd": (lambda: optax.sgd(rate, momentum=0.9), {"[0].trace": M, "[1].count": S}),
    "lion": (lambda: optax.lion(rate), {"[0].count": B, "[0].mu": M, "[2].count": S}),
    "adagrad": (lambda: optax.adagrad(0.1), {"[0].sum_of_squares": M}),
    "rmsprop": (lambda: optax.rmsprop(rate, initial_scale=0.5), {"[0].nu": M, "[1].count": S}),
    "rmsprop_corrected": (lambda: optax.rmsprop(0.1, bias_correction=True), {"[0].count": B, "[0].nu": M}),
    "rmsprop_centered": (
        lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
        {"[0].mu": M, "[0].nu": M, "[2].trace": M},
    ),
    "rmsprop_centered_corrected": (
        lambda: optax.rmsprop(0.1, centered=True, bias_correction=True),
        {"[0].count": B, "[0].mu": M, "[0].nu": M},
    ),
    "adafactor": (
        lambda: optax.adafactor(rate, min_dim_size_to_factor=2, momentum=0.9),
        {"[0].count": B, "[0].v": M, "[2].count": S, "[4].count": B, "[4].ema": M},
    ),
    "decay_schedule": (lambda: optax.chain(optax.add_decayed_weights(rate), optax.scale(-0.1)), {"[0].count": S}),
    "masked": (
        lambda: optax.masked(optax.adam(rate), {"a": True, "b": False}),
        {f".inner_state[0]{field}": meaning for field, meaning in ADAM.items()} | {".inner_state[1].count": S},
    ),
    "multi_transform": (
        lambda: optax.multi_transform({"x": optax.adam(rate), "y": optax.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y"}),
        {f".inner_states['x'].inner_state[0]{field}": meaning for field, meaning in ADAM.items()}
        | {".inner_states['x'].inner_state[1].count": S, ".inner_states['y'].inner_state[0].trace": M},
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.adam)(rate, b2=0.99),
        {f".inner_state[0]{field}": meaning for field, meaning in ADAM.items()}
        | {".count": S, ".hyperparams_states['learning_rate'].count": S, ".hyperparams['": KEPT},
    ),
    "multi_steps": (
        lambda: optax.MultiSteps(optax.adam(rate), every_k_schedule=2),
        {f".inner_opt_state[0]{field}": meaning for field, meaning in ADAM.items()}
        | {".inner_opt_state[1].count": S, ".gradient_step": S, ".mini_step": CLEARED, ".acc_grads": CLEARED},
    ),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(optax.adam(rate), max_consecutive_errors=3),
        {f".inner_state[0]{field}": meaning for field, meaning in ADAM.items()}
        | {".inner_state[1].count": S, ".notfinite_count": KEPT, ".last_finite": KEPT, ".total_notfinite": KEPT},
    ),
    "named_chain": (
        lambda: optax.named_chain(("adam", optax.scale_by_adam()), ("rate", optax.scale_by_schedule(rate))),
        {f"['adam']{field}": meaning for field, meaning in ADAM.items()} | {"['rate'].count": S},
    ),
    "nested": (
        lambda: optax.apply_if_finite(
            optax.MultiSteps(
                optax.chain(
                    optax.clip_by_global_norm(1.0),
                    optax.multi_transform({"x": optax.inject_hyperparams(optax.adam)(rate), "y": optax.identity()}, {"a": "x", "b": "y"}),
                    warmup_after_resets(4),
                ),
                every_k_schedule=2,
            ).gradient_transformation(),
            max_consecutive_errors=3,
        ),
        {f".inner_state.inner_opt_state[1].inner_states['x'].inner_state.inner_state[0]{field}": meaning for field, meaning in ADAM.items()}
        | {
            ".inner_state.inner_opt_state[1].inner_states['x'].inner_state.count": S,
            ".inner_state.inner_opt_state[1].inner_states['x'].inner_state.hyperparams_states": S,
            ".inner_state.inner_opt_state[1].inner_states['x'].inner_state.hyperparams['": KEPT,
            ".inner_state.inner_opt_state[2].updates_since_reset": CLEARED,
            ".inner_state.gradient_step": S,
            ".inner_state.mini_step": CLEARED,
            ".inner_state.acc_grads": CLEARED,
            ".notfinite_count": KEPT,
            ".last_finite": KEPT,
            ".total_notfinite": KEPT,
        },
    ),
}  # fmt: skip


def fresh_and_used(optimizer: Any, params: Any = PARAMS) -> tuple[Any, Any]:
    """A new state, and one some updates later: the last of seven gradients is not finite where the optimizer minds."""
    params = jax.tree.map(jnp.asarray, params)
    fresh = optimizer.init(params)
    update = jax.jit(optimizer.update, compiler_options=QUICK_COMPILE)
    used, random = fresh, np.random.RandomState(0)
    for _ in range(7):
        gradients = {name: jnp.asarray(random.standard_normal(x.shape), x.dtype) for name, x in params.items()}
        _, used = update(gradients, used, params)
    if isinstance(used, optax.ApplyIfFiniteState):
        _, used = update({name: jnp.full_like(x, jnp.nan) for name, x in params.items()}, used, params)
    return fresh, used


def meaning_of(path: Any, meanings: dict[str, str]) -> str:
    """Exactly one entry must start like the path of an array."""
    (meaning,) = {meaning for start, meaning in meanings.items() if jax.tree_util.keystr(path).startswith(start)}
    return meaning


def assert_equal(x: Any, y: Any, path: Any = "") -> None:
    np.testing.assert_array_equal(x, y, err_msg=str(path))
    assert (x.dtype, x.shape) == (y.dtype, y.shape), path


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert_equal(x, y, path)


@pytest.mark.parametrize("case", CASES)
def test_every_set_takes_its_parts_from_a_fresh_state_and_leaves_the_rest(case: str) -> None:
    make, meanings = CASES[case]
    fresh, used = fresh_and_used(make())
    moved = {
        start: any(
            not np.array_equal(old, new)
            for (path, old), new in zip(jax.tree.leaves_with_path(used), jax.tree.leaves(fresh), strict=True)
            if jax.tree_util.keystr(path).startswith(start)
        )
        for start, meaning in meanings.items()
        if meaning in (M, B, S)
    }
    assert all(moved.values()), moved  # else old and fresh could not be told apart
    for name, parts in OPTIMIZER_SETS.items():
        after = reset_opt_state(used, fresh, parts)
        assert jax.tree.structure(after) == jax.tree.structure(used)
        for (path, x), old, new in zip(
            jax.tree.leaves_with_path(after), jax.tree.leaves(used), jax.tree.leaves(fresh), strict=True
        ):  # fmt: skip
            meaning = meaning_of(path, meanings)
            expected = jnp.zeros_like(old) if meaning == CLEARED else new if meaning in parts else old
            assert_equal(x, expected, f"{name} {path}")


def test_the_sets_are_these() -> None:
    assert {"all": {M, B, S}, "moments_and_bias": {M, B}, "moments": {M}, "none": set()} == OPTIMIZER_SETS


def test_what_every_set_is_called() -> None:
    names = {
        (True, "all"): "reference and optimizer",
        (True, "moments"): "reference and optimizer (moments)",
        (True, "none"): "reference",
        (False, "all"): "optimizer",
        (False, "moments_and_bias"): "optimizer (moments_and_bias)",
    }
    for (reference, optimizer), name in names.items():
        assert what_is_reset(reference, optimizer) == name


def test_the_table_names_all_fields_of_every_state() -> None:
    for kind, fields in FIELDS.items():
        assert tuple(sorted(fields)) == tuple(sorted(kind._fields)), kind  # type: ignore[attr-defined]


def test_dtypes_stay_those_of_the_state_where_updates_have_changed_them() -> None:
    # With bfloat16 parameters a decay rate that is a float32 array makes the moments float32 in the first update; a fresh one has bfloat16.
    fresh, used = fresh_and_used(optax.inject_hyperparams(optax.adam)(rate), {name: x.astype("bfloat16") for name, x in PARAMS.items()})
    used = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, used)
    assert fresh.inner_state[0].mu["a"].dtype == jnp.bfloat16
    after = reset_opt_state(used, fresh, OPTIMIZER_SETS["all"])
    assert jax.tree.map(lambda x: (x.dtype, x.shape), after) == jax.tree.map(lambda x: (x.dtype, x.shape), used)
    assert not after.inner_state[0].mu["a"].any()


class MadeUpState(NamedTuple):
    momentum: Any
    steps: Any


@pytest.mark.parametrize("parts", OPTIMIZER_SETS.values(), ids=OPTIMIZER_SETS)
def test_an_unknown_state_is_refused_by_name_however_deep_it_lies(parts: Any) -> None:
    made_up = optax.GradientTransformation(lambda params: MadeUpState(params, 0), lambda updates, state, params=None: (updates, state))
    for optimizer in (
        made_up,
        optax.chain(optax.adam(0.1), made_up),
        optax.masked(made_up, {"a": True, "b": False}),
        optax.multi_transform({"x": made_up, "y": optax.adam(0.1)}, {"a": "x", "b": "y"}),
        optax.apply_if_finite(optax.MultiSteps(made_up, 2).gradient_transformation(), 3),
        optax.inject_hyperparams(lambda learning_rate: made_up)(rate),
    ):
        state = optimizer.init(jax.tree.map(jnp.asarray, PARAMS))
        with pytest.raises(ResetError, match=r"test_optimizer\.MadeUpState with fields \['momentum', 'steps'\].*FIELDS of jaxprorl/resets"):
            reset_opt_state(state, state, parts)
    schedule_free = optax.contrib.schedule_free_adamw(0.1).init(jax.tree.map(jnp.asarray, PARAMS))
    with pytest.raises(ResetError, match="ScheduleFreeState"):
        reset_opt_state(schedule_free, schedule_free, parts)


# --- the training state ------------------------------------------------------------------------------------------------------------------


def used_state(config: ConfigDict, strategy: str = "dp") -> tuple[TrainState, TrainState]:
    """A state some updates after its start, and its shardings: moments and counts are not zero, the reference is not the policy."""
    model = tiny_model()
    shardings = state_shardings(config, model, make_mesh(strategy))
    state = start_state(config, jax.device_put(random_params(model), shardings.params), shardings)
    optimizer = make_optimizer(config)
    opt_state = state.opt_state
    update = jax.jit(optimizer.update, out_shardings=(shardings.params, shardings.opt_state), compiler_options=QUICK_COMPILE)
    for _ in range(3):
        _, opt_state = update(jax.tree.map(jnp.ones_like, state.params), opt_state, state.params)
    halve = jax.jit(
        lambda params: jax.tree.map(lambda x: 0.5 * x, params), out_shardings=shardings.reference, compiler_options=QUICK_COMPILE
    )
    return TrainState(state.params, halve(state.params), opt_state), shardings


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZER_SETS)
def test_a_reset_copies_the_policy_and_starts_parts_of_the_optimizer_afresh(optimizer: str, reference: bool, jitted: bool) -> None:
    config = tiny_config(resets__optimizer=optimizer, resets__reference=reference, optimizer__warmup_updates=8)
    before, _ = used_state(config)
    assert update_count(before.opt_state) == 3
    function = jax.jit(lambda state: reset(state, config)) if jitted else (lambda state: reset(state, config))
    after = function(before)
    fresh = make_optimizer(config).init(before.params)
    assert_same(after.params, before.params)
    assert_same(after.reference, before.params if reference else before.reference)
    assert_same(after.opt_state, reset_opt_state(before.opt_state, fresh, OPTIMIZER_SETS[optimizer]))
    if optimizer in ("all", "none"):
        assert_same(after.opt_state, fresh if optimizer == "all" else before.opt_state)
    assert update_count(after.opt_state) == (0 if optimizer == "all" else 3)


@pytest.mark.parametrize("optimizer", OPTIMIZER_SETS)
def test_a_compiled_reset_keeps_shardings_and_takes_over_the_memory(optimizer: str) -> None:
    config = tiny_config(mesh__strategy="fsdp", resets__optimizer=optimizer, resets__warmup_updates=4)
    before, shardings = used_state(config, "fsdp")
    compiled = compile_reset(config, abstract_state(config, before.params, shardings), shardings)
    given = jax.tree.leaves((before.reference, before.opt_state))
    places = {shard.data.unsafe_buffer_pointer() for leaf in given for shard in leaf.addressable_shards if leaf.ndim}
    after = compiled(before)
    for leaf, sharding in zip(jax.tree.leaves(after), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert all(leaf.is_deleted() for leaf in given)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))  # the engine samples with them
    taken = jax.tree.leaves((after.reference, after.opt_state))
    assert {shard.data.unsafe_buffer_pointer() for leaf in taken for shard in leaf.addressable_shards if leaf.ndim} == places
    assert after.opt_state[1][0].mu["up_kernel"].addressable_shards[0].data.shape == (2, 16, 64)
    assert_same(after.reference, before.params)


def test_reference_and_policy_do_not_share_memory() -> None:
    # The training step donates the state: a shared buffer would be given away twice.
    config = tiny_config()
    after = jax.jit(lambda state: reset(state, config), donate_argnums=0)(used_state(config)[0])
    shards = [shard for leaf in jax.tree.leaves((after.params, after.reference)) for shard in leaf.addressable_shards]
    pointers = [shard.data.unsafe_buffer_pointer() for shard in shards]
    assert len(pointers) == len(set(pointers))
