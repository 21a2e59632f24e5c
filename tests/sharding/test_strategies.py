"""Tables and meshes by hand; and on eight devices: every strategy computes what one device does."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from eight_devices import CASES, ENGINES, OWN
from factories import random_params, tiny_model

from jaxprorl.errors import ConfigError
from jaxprorl.models.qwen2 import declarations
from jaxprorl.sharding import strategies
from jaxprorl.sharding.mesh import make_mesh, moment_shardings, param_shardings
from jaxprorl.sharding.strategies import AXES, BATCH_AXES, FSDP, STRATEGIES, WHOLE, Strategy, Table, mesh_sizes

# What one device gives is compared as it is, or in units of the largest entry of its own kind (gradients, moments).
LIMITS = {"metrics.kl.": 1e-4, "kl_sum_PN": 1e-4}  # means of differences of log-probs: a thousandth of what they are differences of


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_table_names_every_logical_axis_and_only_mesh_axes(strategy: str) -> None:
    logical = {axis for d in declarations(tiny_model(tie_word_embeddings=False)).values() for axis in d.axes if axis}
    plan = STRATEGIES[strategy]
    for table in (plan.params, plan.moments):
        assert table.keys() == logical
        assert set(table.values()) <= {None, *AXES}
    assert {plan.fills, *plan.needs, *BATCH_AXES} <= set(AXES)


@pytest.mark.parametrize(
    ("strategy", "sizes", "devices", "expected"),
    [
        ("dp", {}, 8, (8, 1, 1, 1)),
        ("fsdp", {}, 8, (1, 8, 1, 1)),
        ("fsdp", {"data": 2}, 8, (2, 4, 1, 1)),
        ("zero1", {"data": 2, "fsdp": 4}, 8, (2, 4, 1, 1)),
        ("tp", {"data": 2}, 8, (2, 1, 4, 1)),
        ("fsdp_tp", {"tensor": 2}, 8, (1, 4, 2, 1)),
        ("fsdp_cp", {"context": 4, "data": 2}, 8, (2, 1, 1, 4)),
        ("fsdp_tp", {"tensor": 8}, 8, (1, 1, 8, 1)),
    ],
)
def test_the_strategy_fills_what_the_sizes_leave(strategy: str, sizes: dict[str, int], devices: int, expected: tuple[int, ...]) -> None:
    assert tuple(mesh_sizes(strategy, sizes, devices)[axis] for axis in AXES) == expected


@pytest.mark.parametrize(
    ("strategy", "sizes", "words"),
    [
        ("fsdp", {"tensor": 2}, "tensor = 2: strategy 'fsdp' splits nothing over it"),
        ("fsdp_tp", {}, "tensor = 0: strategy 'fsdp_tp' needs 2 or more"),
        ("fsdp_cp", {"context": 1}, "context = 1: strategy 'fsdp_cp' needs 2 or more"),
        ("fsdp", {"data": 3}, "fsdp = 0: the sizes {'data': 3} take 3 devices, there are 8"),
        ("fsdp", {"data": 2, "fsdp": 2}, "fsdp = 2: the sizes {'data': 2, 'fsdp': 2} take 4 devices, there are 8; leave fsdp at 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_axis(strategy: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        mesh_sizes(strategy, sizes, 8)
    assert words in str(caught.value)


def test_an_axis_of_the_moments_alone_may_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strategies.STRATEGIES, "own", Strategy(WHOLE, {**WHOLE, "mlp": "tensor"}, "data"))
    assert mesh_sizes("own", {"tensor": 2}, 8) == {"data": 4, "fsdp": 1, "tensor": 2, "context": 1}


def test_an_axis_to_fill_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strategies.STRATEGIES, "own", Strategy(WHOLE, WHOLE, "fspd"))
    with pytest.raises(ValueError, match=r"^strategy = 'own' fills 'fspd', no mesh axis"):
        mesh_sizes("own", {}, 8)


def test_heads_are_never_cut_and_a_vocabulary_must_divide() -> None:
    mesh = make_mesh("tp", jax.devices()[:2])
    with pytest.raises(ValueError, match=r"'tp' splits embed \(49, 32\) over 2 devices along a dimension of 49"):
        param_shardings(tiny_model(vocab_size=49), mesh, "tp")
    with pytest.raises(ValueError, match=r"splits 3 attention heads over 2 devices along tensor"):
        param_shardings(tiny_model(num_attention_heads=3, num_key_value_heads=1), mesh, "tp")
    # One key-value head cannot be split over two devices: both hold it, and the query heads are split all the same.
    specs = {name: sharding.spec for name, sharding in param_shardings(tiny_model(num_key_value_heads=1), mesh, "tp").items()}
    assert "tensor" not in (*specs["k_kernel"], *specs["v_bias"])
    assert "tensor" in specs["q_kernel"] and "tensor" in specs["o_kernel"]
    specs = {name: sharding.spec for name, sharding in param_shardings(tiny_model(num_key_value_heads=2), mesh, "tp").items()}
    assert "tensor" in specs["k_kernel"] and "tensor" in specs["v_bias"]


def test_a_strategy_of_ones_own_is_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/sharding.md, "A strategy of your own": the MLP split over fsdp, the rest whole."""
    monkeypatch.setitem(strategies.STRATEGIES, "own", OWN)
    mesh = make_mesh("own")
    assert mesh.shape["fsdp"] == 2
    shardings = param_shardings(tiny_model(), mesh, "own")
    split = {name for name, sharding in shardings.items() if not sharding.is_fully_replicated}
    assert split == {"gate_kernel", "up_kernel", "down_kernel"}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({**WHOLE, "vocab": "fsdp"}, "'own' splits vocab over fsdp, whose 2 devices have different tokens"),
        ({**WHOLE, "heads": "fsdp"}, "'own' splits heads over fsdp, whose 2 devices have different tokens"),
        ({**WHOLE, "kv_heads": "fsdp"}, "'own' splits kv_heads over fsdp, whose 2 devices have different tokens"),
        ({**WHOLE, "mlp": "fspd"}, "'own' splits mlp over 'fspd', no mesh axis; use one of ('data', 'fsdp', 'tensor', 'context'), or None"),
        ({**WHOLE, "mpl": "fsdp"}, "'own': its table names the axes ['embed', 'heads', 'kv_heads', 'layers', 'mlp', 'mpl', 'vocab']"),
        ({"embed": "fsdp"}, "'own': its table names the axes ['embed']; it must name all of ['embed', 'heads', 'kv_heads', 'layers',"),
        ({**FSDP, "mlp": "fsdp"}, "'own', gate_kernel: axes ('layers', 'embed', 'mlp') map to [None, 'fsdp', 'fsdp']: a mesh axis can"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_strategy_and_axis(params: Table, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strategies.STRATEGIES, "own", Strategy(params, WHOLE, "fsdp"))
    with pytest.raises(ConfigError) as caught:
        param_shardings(tiny_model(), make_mesh("own"), "own")
    assert str(caught.value).startswith("mesh.strategy = ") and words in str(caught.value)


@pytest.mark.parametrize("axis", ["data", "fsdp", "context"])
@pytest.mark.parametrize("split", ["vocab", "heads", "kv_heads"])
def test_what_needs_the_same_tokens_may_be_split_in_moments_and_over_one_device(
    split: str, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {**WHOLE, split: axis}
    monkeypatch.setitem(strategies.STRATEGIES, "own", Strategy(WHOLE, table, axis))
    spec = moment_shardings(tiny_model(num_key_value_heads=2), make_mesh("own"), "own")[{"vocab": "embed"}.get(split, "k_kernel")].spec
    assert (axis in spec) == (split != "heads")
    monkeypatch.setitem(strategies.STRATEGIES, "own", Strategy(table, table, axis))
    param_shardings(tiny_model(), make_mesh("own", jax.devices()[:1]), "own")
    with pytest.raises(ConfigError, match=f"splits {split} over {axis}"):
        param_shardings(tiny_model(num_key_value_heads=2), make_mesh("own"), "own")


# --- on eight devices ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("eight")
    script = Path(__file__).parent / "eight_devices.py"
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: dict(np.load(folder / f"{name}.npz")) for name in (*CASES, *(f"engine_{name}" for name in ENGINES))}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_strategy_computes_what_one_device_does(results: dict[str, dict[str, np.ndarray]]) -> None:
    """Init, log-probs, metrics, moments (of plain SGD: gradients), parameters, reset; restores: see the script."""
    assert {strategy for strategy, *_ in CASES.values()} == {*STRATEGIES, "own"}
    assert (results["one"]["micro_batches"] == 2).all()
    moved = results["one"]["params.up_kernel"] - random_params(CASES["one"][3])["up_kernel"]
    assert np.abs(moved).max() > 1e-4
    for name, (*_, model, count) in CASES.items():
        alone = results["one_shared" if "shared" in name else "one" if model == CASES["one"][3] else "few_heads_one"]
        assert results[name].keys() == alone.keys()
        for key, value in results[name].items():
            limit = next((limit for prefix, limit in LIMITS.items() if key.startswith(prefix)), 1e-5)
            scale = max(np.abs(alone[key]).max(), 1e-9)
            np.testing.assert_allclose(value / scale, alone[key] / scale, rtol=0, atol=limit, err_msg=f"{name} ({count} devices): {key}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shared_prompts_compute_what_prompts_of_ones_own_do(results: dict[str, dict[str, np.ndarray]]) -> None:
    shared, alone = results["one_shared"], results["one"]
    assert (shared["micro_batches"] < alone["micro_batches"]).any()  # two fifths of the tokens were prompts
    for key, value in alone.items():
        if key.startswith(("metrics.", "params.", "kl_sum_PN")):
            limit = next((limit for prefix, limit in LIMITS.items() if key.startswith(prefix)), 1e-5)
            scale = max(np.abs(value).max(), 1e-9)
            np.testing.assert_allclose(shared[key] / scale, value / scale, rtol=0, atol=limit, err_msg=key)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in ENGINES if "one" not in name])
def test_engine_weights_follow_the_table(name: str, results: dict[str, dict[str, np.ndarray]]) -> None:
    """The same tokens, and their log-probs up to float32 sums in another order; that a swap copies nothing is checked in the script."""
    sharded, alone = results[f"engine_{name}"], results["engine_few_heads_one" if "few" in name else "engine_one"]
    assert sharded.keys() == alone.keys() and len(alone) == 2 * 2 * 6 * 4  # swaps, arrays, prompts, samples
    for key, value in alone.items():
        if key.startswith("tokens"):
            np.testing.assert_array_equal(sharded[key], value, err_msg=key)
        else:
            np.testing.assert_allclose(sharded[key], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=key)
