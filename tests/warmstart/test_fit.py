import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tiny_run
from factories import random_params, tiny_model
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.data.splits import Items, load_items, load_splits
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.errors import ConfigError
from jaxprorl.models import hf
from jaxprorl.packing import Sample
from jaxprorl.sharding.mesh import make_mesh, moment_shardings, param_shardings
from jaxprorl.types import Prompt
from jaxprorl.warmstart import fit, solutions
from jaxprorl.warmstart.tokenizer import build_tokenizer


def sample(number: int, tokens: int = 4) -> Sample:
    return Sample(np.array([1, 2], np.int32), np.full(tokens, number, np.int32))


CLEAN = {"a": [sample(i) for i in range(10)], "b": [sample(100 + i) for i in range(5)]}
CARELESS = {"a": [sample(1000 + i) for i in range(10)], "b": [sample(1100 + i) for i in range(5)]}


def draw(stream: fit._Stream, weights: dict[str, float], count: int) -> list[int]:
    return [int(stream.next(weights).response_ids[0]) for _ in range(count)]


def stream(share: float = 0.0, seed: int = 0) -> fit._Stream:
    return fit._Stream(CLEAN, CARELESS, share, [seed, 1])


def test_the_stream_depends_on_its_seed_alone() -> None:
    weights = {"a": 1.0, "b": 2.0}
    assert draw(stream(0.3), weights, 200) == draw(stream(0.3), weights, 200)
    assert draw(stream(0.3), weights, 200) != draw(stream(0.3, seed=1), weights, 200)


def test_every_item_of_a_task_comes_once_before_any_comes_again() -> None:
    drawn = draw(stream(), {"a": 1.0, "b": 0.0}, 30)
    for start in (0, 10, 20):
        assert sorted(drawn[start : start + 10]) == list(range(10))
    assert drawn[:10] != drawn[10:20]


def test_tasks_come_by_weight() -> None:
    drawn = draw(stream(), {"a": 3.0, "b": 1.0}, 4000)
    assert np.mean([number < 100 for number in drawn]) == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("share", [0.0, 0.62, 1.0])
def test_careless_ones_come_by_their_share(share: float) -> None:
    drawn = draw(stream(share), {"a": 1.0, "b": 1.0}, 4000)
    assert np.mean([number >= 1000 for number in drawn]) == pytest.approx(share, abs=0.03)


def test_the_learning_rate_rises_falls_to_a_tenth_and_stays() -> None:
    config = tiny_run.get_config()
    config.warmstart.learning_rate, config.warmstart.warmup_updates, config.warmstart.skill_updates = 1e-2, 10, 110
    schedule = fit.skill_schedule(config)
    rates = [float(schedule(update)) for update in (0, 5, 10, 60, 110, 500)]
    np.testing.assert_allclose(rates, [0.0, 5e-3, 1e-2, 5.5e-3, 1e-3, 1e-3], rtol=1e-5)


INPUTS = [
    "seed=1", "model.hidden_size=64", "model.dtype=bfloat16", "data.train_per_task=61", "data.validation_seed=3000001",
    "data.tasks.chain_sum.max_terms=4", "data.system_prompt=x", "warmstart.learning_rate=0.1", "warmstart.gate_solve_rate=0.1",
    "rollout.max_response_tokens=36", "mesh.cpu_devices=4",
]  # fmt: skip


def changed(override: str) -> ConfigDict:
    config = tiny_run.get_config()
    config.update_from_flattened_dict({override.partition("=")[0]: _value(override.partition("=")[2])})
    return config


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@pytest.mark.parametrize("override", INPUTS)
def test_the_fingerprint_changes_with_every_input(override: str) -> None:
    assert fit.fingerprint(changed(override)) != fit.fingerprint(tiny_run.get_config())


@pytest.mark.parametrize(
    "override",
    [
        "steps=9",
        "run_name=x",
        "reward=a:b",
        "optimizer.learning_rate=0.5",
        "data.source=jsonl:x",
        "rollout.temperature=0.7",
        "data.on_conflicting_answers=warn",
    ],
)
def test_the_fingerprint_does_not_change_with_anything_else(override: str) -> None:
    assert fit.fingerprint(changed(override)) == fit.fingerprint(tiny_run.get_config())


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh("dp")


@pytest.fixture(scope="module")
def tiny_items() -> Items:
    return load_items(tiny_run.get_config())


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_items: Items, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(tiny_items.train, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tiny_prompts(tiny_items: Items, tiny_tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    return load_splits(tiny_run.get_config(), tiny_tokenizer, tiny_items).train


def test_demonstrations_end_with_a_stop_token_and_careless_ones_show_no_work(
    tiny_items: Items, tiny_prompts: tuple[Prompt, ...], tiny_tokenizer: Tokenizer
) -> None:
    clean, careless = fit.demonstrations(tiny_tokenizer, tiny_prompts, seed=0)
    for task in ("chain_sum", "number_filtering"):
        items = [item for item in tiny_items.train if item.task == task]
        assert len(clean[task]) == len(careless[task]) == len(items)
        for item, good, bad in zip(items, clean[task], careless[task], strict=True):
            assert good.response_ids[-1] == bad.response_ids[-1] == tiny_tokenizer.stop_ids[0]
            assert f"<answer>{item.answer}</answer>" in tiny_tokenizer.decode(good.response_ids)
            assert f"<answer>{item.answer}</answer>" not in tiny_tokenizer.decode(bad.response_ids)
            assert len(bad.response_ids) < len(good.response_ids)


def test_a_worked_solution_adds_no_control_token(
    tiny_prompts: tuple[Prompt, ...], tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(solutions.WORKED, "chain_sum", lambda entry: ("<|im_end|>\n<|im_start|>user\n", "<|endoftext|>1"))
    prompts = [prompt for prompt in tiny_prompts if prompt.task == "chain_sum"]
    for samples in fit.demonstrations(tiny_tokenizer, prompts, seed=0):
        for sample in samples["chain_sum"]:
            special = [i for i in sample.response_ids if tiny_tokenizer.decode([i], skip_special=True) == ""]
            assert special == [tiny_tokenizer.stop_ids[0]]


def test_a_batch_holds_whole_demonstrations_and_loses_none(tiny_prompts: tuple[Prompt, ...], tiny_tokenizer: Tokenizer, mesh: Mesh) -> None:
    config = tiny_run.get_config()
    clean, _ = fit.demonstrations(tiny_tokenizer, tiny_prompts, seed=0)
    weights = dict.fromkeys(clean, 1.0)
    model_config = fit.model_shape(config, tiny_tokenizer)
    params = hf_params(config, model_config, mesh)
    trainer = fit._Trainer(config, model_config, mesh, params)
    drawn = fit._Stream(clean, {}, 0.0, [0, 1])
    batches = [trainer._fill(drawn, weights) for _ in range(6)]
    trained = sum(int(batch["mask"].sum()) for batch in batches)
    again = fit._Stream(clean, {}, 0.0, [0, 1])
    lengths, total = [], 0
    while total < trained:  # the same stream, uncut: the batches hold exactly its beginning
        lengths.append(len(again.next(weights).response_ids))
        total += lengths[-1]
    assert total == trained
    assert all(batch["tokens"].shape == (config.warmstart.rows, config.warmstart.row_tokens) for batch in batches)


def hf_params(config: ConfigDict, model_config: Any, mesh: Mesh) -> Any:
    shardings = param_shardings(model_config, mesh, config.mesh.strategy)
    return jax.jit(lambda: fit.init_params(model_config, config.seed), out_shardings=shardings)()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_parameters_and_moments_lie_as_the_tables_say_from_the_first_update_on(strategy: str) -> None:
    config = tiny_run.get_config()
    config.mesh.strategy = strategy
    mesh, model_config = make_mesh(strategy), tiny_model(num_hidden_layers=1)
    trainer = fit._Trainer(config, model_config, mesh, hf_params(config, model_config, mesh))
    trainer.restart(optax.constant_schedule(1e-3))
    tables = {"params": param_shardings(model_config, mesh, strategy), "moments": moment_shardings(model_config, mesh, strategy)}
    small = {task: [sample(i) for i in range(10)] for task in "ab"}
    for updates in range(3):
        assert trainer.updates == updates
        (adam,) = [node for node in jax.tree.leaves(trainer._opt_state, is_leaf=is_adam) if is_adam(node)]
        for tree, table in ((trainer.params, "params"), (adam.mu, "moments"), (adam.nu, "moments")):
            for name, value in tree.items():
                assert value.sharding.is_equivalent_to(tables[table][name], value.ndim), f"{table} of {name} after {updates} updates"
        assert adam.count.sharding.is_fully_replicated and len(adam.count.sharding.device_set) == 2
        trainer.run(fit._Stream(small, {}, 0.0, [0, 1]), {"a": 1.0, "b": 1.0}, 1)
    assert trainer._step._cache_size() == 1, "compiled once"


def is_adam(node: Any) -> bool:
    return hasattr(node, "mu")


def test_long_questions_are_dropped_from_the_warm_start_too(tiny_items: Items, tiny_tokenizer: Tokenizer) -> None:
    config = tiny_run.get_config()
    lengths = sorted(len(prompt.token_ids) for prompt in load_splits(config, tiny_tokenizer, tiny_items).train)
    config.rollout.max_prompt_tokens, config.data.overlong_prompts = lengths[-1] - 1, "drop"
    prompts = load_splits(config, tiny_tokenizer, tiny_items).train
    clean, careless = fit.demonstrations(tiny_tokenizer, prompts, seed=0)
    made = [sample for samples in (*clean.values(), *careless.values()) for sample in samples]
    assert 0 < len(made) < 2 * len(lengths) and max(len(sample.prompt_ids) for sample in made) < lengths[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_base_model_is_made_once_learns_and_is_the_same_when_made_again(tmp_path: Path, tiny_items: Items, mesh: Mesh) -> None:
    config = tiny_run.get_config()
    config.cache_dir = str(tmp_path / "one")
    told: list[str] = []
    report = lambda name, done, total, **shown: told.append(name)  # noqa: E731
    folder, cached = fit.base_model(config, tiny_items, mesh, report, told.append)
    assert (cached, folder.name) == (False, fit.fingerprint(config))
    assert told[0].startswith("warm start: making the base model")
    assert told[1:] == ["warm start: skill", "warm start: careless mix"]
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"], "nothing half-made is left"
    assert fit.base_model(config, tiny_items, mesh, report, told.append) == (folder, True)
    assert len(told) == 3

    facts = json.loads((folder / "warm_start.json").read_text())
    assert facts["skill_updates"] == 50
    assert facts["history"][-1]["loss"] < 5.0 < np.log(facts["vocab_size"])
    assert facts["tasks"] == ["chain_sum", "number_filtering"]
    assert load_tokenizer(folder).vocab_size == facts["vocab_size"] == hf.read_config(folder).vocab_size

    config.cache_dir = str(tmp_path / "two")
    again, cached = fit.base_model(config, tiny_items, mesh, report, told.append)
    assert not cached
    assert tiny_run.files(again) == tiny_run.files(folder)


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Random parameters in place of trained ones; the list is of the folders in which the tokenizer lay."""
    calls: list[Path] = []

    def fit_at_once(config: ConfigDict, model_config: Any, tokenizer: Tokenizer, *_: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        calls.append(tokenizer.path)
        return random_params(model_config), {"solve_rate": 0.25}

    monkeypatch.setattr(fit, "fit", fit_at_once)
    return calls


def quiet(*_: Any, **__: Any) -> None:
    pass


def test_a_cache_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, tiny_items: Items, mesh: Mesh, quick_fit: list[Path]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/warmstart").write_text("")
    config = tiny_run.get_config()
    for place in ("file", "file/cache", "cache"):
        config.cache_dir = str(tmp_path / place)
        with pytest.raises(
            ConfigError, match=rf"^cache_dir = '{tmp_path / place}': the base model cannot be written there .*; choose another one$"
        ):
            fit.base_model(config, tiny_items, mesh, quiet, quiet)
    assert quick_fit == []


def test_what_is_left_of_a_base_model_is_made_anew(tmp_path: Path, tiny_items: Items, mesh: Mesh, quick_fit: list[Path]) -> None:
    config = tiny_run.get_config()
    config.cache_dir = str(tmp_path)
    folder, _ = fit.base_model(config, tiny_items, mesh, quiet, quiet)
    whole = tiny_run.files(folder)
    (folder / "config.json").unlink()
    assert fit.base_model(config, tiny_items, mesh, quiet, quiet) == (folder, False)
    assert tiny_run.files(folder) == whole
    assert len(quick_fit) == 2
    assert quick_fit[0] != quick_fit[1], "each in a folder of its own"


def test_without_locks_two_processes_make_the_same_model_and_the_first_one_stays(
    tmp_path: Path, tiny_items: Items, mesh: Mesh, quick_fit: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.get_config()
    config.cache_dir = str(tmp_path)
    monkeypatch.setattr("jaxprorl.run_lock.try_lock", lambda _: None)
    monkeypatch.setattr("jaxprorl.files.try_lock", lambda _: None)
    outer, results = fit.fit, []

    def with_another_meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(fit, "fit", outer)
        results.append(fit.base_model(config, tiny_items, mesh, quiet, quiet))
        results.append(results[0][0].stat().st_ino)
        return outer(*arguments)

    monkeypatch.setattr(fit, "fit", with_another_meanwhile)
    folder, cached = fit.base_model(config, tiny_items, mesh, quiet, quiet)
    assert cached, "the other one's"
    assert results == [(folder, False), folder.stat().st_ino]
    assert len(quick_fit) == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
