import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from factories import random_groups, tiny_config, tiny_model
from saved_states import CONFIG, HOST, flip_a_bit, largest_file, new_state

from configs.base import stage
from jaxprorl.checkpoint import Checkpoints, Host
from jaxprorl.data.prompts import Item
from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.errors import CheckpointError, ConfigError, DataError, ModelError
from jaxprorl.models.compute import Compute
from jaxprorl.recipe import stages
from jaxprorl.rollout.surplus import encode
from jaxprorl.run_folder import RunFolder
from jaxprorl.setting import _plan
from jaxprorl.sharding.mesh import make_mesh, param_shardings
from jaxprorl.start import adopt_tokenizer, check_model, check_stage, read_start_params, restored_surplus
from jaxprorl.state import RunState
from jaxprorl.warmstart.tokenizer import build_tokenizer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A start model's folder without weights."""
    folder = tmp_path / "base"
    build_tokenizer([Item("d", "t", ({"role": "user", "content": "1 + 1 ?"},), "2", "here")], folder)
    return folder


def test_the_start_models_small_files_are_copied(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").write_bytes(b"weights")
    run = RunFolder(tmp_path / "run")
    adopt_tokenizer(base, run)
    names = {"chat_template.jinja", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in run.base_model.iterdir()} == names


WITH_BOS = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "add_bos_token": True}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"base.tokenizer\.json: not found"),
        ("tokenizer.json", "{", r"base.tokenizer\.json: not a tokenizer file"),
        ("tokenizer_config.json", json.dumps(WITH_BOS), "base: .* 0 BOS"),
        ("chat_template.jinja", None, "base: no chat template"),
        ("chat_template.jinja", "\n{% for message in %}", "base: the chat template is broken in line 2"),
        ("chat_template.jinja", "{{ raise_exception('two turns only') }}", "base: the chat template failed: two turns only"),
    ],
)
def test_a_folder_that_makes_no_prompts_is_refused_by_its_own_name_and_before_anything_is_copied(
    base: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    (base / name).unlink() if content is None else (base / name).write_text(content)
    with pytest.raises(DataError, match=message):
        adopt_tokenizer(base, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(base: Path) -> None:
    tokenizer = load_tokenizer(base)
    check_model(tiny_config(), tiny_model(vocab_size=tokenizer.vocab_size), tokenizer)
    rows = tokenizer.vocab_size - 1
    with pytest.raises(ModelError, match=rf"base: tokenizer\.json has {rows + 1} tokens, config\.json vocab_size = {rows}"):
        check_model(tiny_config(), tiny_model(vocab_size=rows), tokenizer)


def test_stages_may_be_added_to_a_recipe_but_not_taken_away() -> None:
    rows = tuple(stage(name, 9) for name in ("one", "two", "three"))
    accepted = {}
    for run in (RunState(), RunState(stages_ended=1), RunState(stage=1, stages_ended=1), RunState(stage=1, stages_ended=2)):
        for count in range(4):
            try:
                check_stage(tiny_config(stages=rows[:count]), run)
                accepted.setdefault((run.stage, run.stages_ended), []).append(count)
            except ConfigError as error:
                assert f"{count} are named, and the run is in number {run.stage + 1}" in str(error)
    assert accepted == {(0, 0): [0, 1, 2, 3], (0, 1): [1, 2, 3], (1, 1): [2, 3], (1, 2): [2, 3]}


def test_surplus_is_left_on_resume_where_temperature_mix_data_tokenizer_and_reward_are_what_they_were() -> None:
    groups, identity = random_groups(3), {"data": "d", "tokenizer": "t", "reward": "r"}
    prompts = [dataclasses.replace(group.prompt, task="ab"[number % 2]) for number, group in enumerate(groups)]
    host = Host(RunState(policy_version=1), {}, identity, encode(groups), surplus_temperature=1.2)

    def left(host: Host = host, identity: dict[str, str] = identity, **changes: Any) -> list[int]:
        config = tiny_config(rollout__max_staleness=1, **changes)
        return [group.prompt.prompt_id for group in restored_surplus(host, identity, config, prompts)]

    assert left() == [0, 1, 2]
    assert left(data__mix=("a",)) == [0, 2]
    assert left(rollout__temperature=0.6) == left(dataclasses.replace(host, surplus_temperature=None)) == []
    for name in identity:
        assert left(identity=identity | {name: "other"}) == []


def test_every_reset_that_may_come_in_a_stage_is_compiled_before_the_loop() -> None:
    declared = stage("one", 8), stage("two", 8, reset_reference=True, reset_optimizer="moments")
    config = tiny_config(stages=declared, resets__reference=False, resets__optimizer="all")
    plan = _plan(stages(config)[1], config, Compute())
    assert set(plan.resets) == {(False, "all"), (True, "moments"), (True, "all")}


def test_a_damaged_checkpoint_of_the_run_to_start_from_is_refused_with_a_remedy_that_holds_there(tmp_path: Path) -> None:
    run, model = RunFolder(tmp_path / "other"), tiny_model()
    mesh = make_mesh("dp")
    with Checkpoints(run.checkpoints, CONFIG) as checkpoints:
        checkpoints.save(new_state(model, mesh), HOST)
    flip_a_bit(largest_file(run.checkpoints, 3))
    with pytest.raises(CheckpointError, match="checkpoint step 3 is damaged: ") as caught:
        read_start_params(run.path, model, param_shardings(model, mesh, "dp"))
    assert f"launch/export_hf.py --run {run.path} " in str(caught.value)
    assert "on_damage" not in str(caught.value), "it is for a run that goes on"
