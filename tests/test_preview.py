"""What a new run is refused for before it has a folder and before a warm start."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny_run
from factories import random_params, tiny_model
from ml_collections import ConfigDict

from configs.base import stage
from jaxprorl import preview
from jaxprorl.data.splits import Items, load_items
from jaxprorl.errors import ConfigError, DataError, ModelError, UserError
from jaxprorl.models.hf import write_folder
from jaxprorl.preview import check_devices, start_model
from jaxprorl.recipe import longest, stage_configs
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.start import check_model
from jaxprorl.warmstart.tokenizer import build_tokenizer

Changes = dict[str, Any]


def experiment(folder: Path, changes: Changes) -> ConfigDict:
    config = tiny_run.get_config()
    config.cache_dir, config.runs_dir = str(folder / "cache"), str(folder / "runs")
    for name, value in changes.items():
        *groups, field = name.split(".")
        section = config
        for group in groups:
            section = section[group]
        section[field] = value
    return config


def make_preview(config: ConfigDict) -> None:
    """`preview.check_start` on the devices that the tests have."""
    items, mesh = load_items(config), make_mesh(config.mesh.strategy)
    with start_model(config, items, mesh) as (model_config, tokenizer):
        check_model(longest(stage_configs(config)), model_config, tokenizer)
        check_devices(config, model_config, mesh)
        preview.read_prompts(config, tokenizer, items)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh.strategy": "tp", "model.num_attention_heads": 3}, "splits 3 attention heads over 2 devices along tensor"),
        ({"mesh.strategy": "tp", "model.num_attention_heads": 2, "model.intermediate_size": 65}, "gate_kernel (1, 32, 65) over 2 devices"),
        ({"mesh.strategy": "fsdp", "model.hidden_size": 33}, "splits embed (320, 33) over 2 devices"),
        ({"mesh.strategy": "zero1", "model.hidden_size": 33}, "splits embed (320, 33) over 2 devices"),
        ({"rollout.slots": 33}, "rollout.slots = 33: must divide by the 2 devices that share rows, e.g. 34"),
        ({"batch.micro_batch_rows": 7}, "batch.micro_batch_rows = 7: must divide by the 2 devices"),
        ({"warmstart.rows": 7}, "warmstart.rows = 7: must divide by the 2 devices"),
        ({"model.attention": "triton"}, "model.attention = 'triton': it runs on GPUs only"),
        ({"warmstart.row_tokens": 30}, "warmstart.row_tokens = 30: the longest demonstration of chain_sum has"),
        (
            {"stages": (stage("one", 5), stage("two", 5, {"rollout.slots": 33}))},
            "stages: in stage 'two', rollout.slots = 33: must divide by the 2 devices",
        ),
        ({"data.tasks.gcd": {}}, "data.tasks.gcd: no worked solution"),
        ({"rollout.max_prompt_tokens": 5}, "tokens, rollout.max_prompt_tokens = 5"),
    ],
    ids=str,
)
def test_what_cannot_work_is_known_before_the_warm_start(changes: Changes, words: str, tmp_path: Path) -> None:
    assert len(jax.devices()) == 2
    config = experiment(tmp_path, changes)
    with pytest.raises(UserError) as caught:
        make_preview(config)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_what_works_is_let_through_and_leaves_nothing(tmp_path: Path) -> None:
    make_preview(experiment(tmp_path, {}))
    make_preview(experiment(tmp_path, {"mesh.strategy": "fsdp"}))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model of three heads."""
    c = tiny_model(vocab_size=256, num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=128)
    tokenizer = build_tokenizer([], tmp_path / "tokenizer")
    c = tiny_model(vocab_size=tokenizer.vocab_size, num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=128)
    write_folder(tmp_path / "model", c, random_params(c), tokenizer.path, tokenizer.stop_ids, tokenizer.pad_id)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mesh.strategy": "tp"}, ConfigError, "splits 3 attention heads over 2 devices"),
        ({"rollout.max_response_tokens": 300, "batch.row_tokens": 400}, ConfigError, "the model's context holds 128 tokens"),
        ({"rollout.max_prompt_tokens": 5}, DataError, "tokens, rollout.max_prompt_tokens = 5"),
        ({"no template": True}, DataError, "no chat template"),
        ({"no tensors": True}, ModelError, "holds no *.safetensors file"),
        ({"no vocabulary": True}, ModelError, "they do not belong together"),
    ],
    ids=str,
)
def test_a_folder_is_looked_at_before_the_run_has_one(
    model: Path, tmp_path: Path, changes: Changes, error: type[UserError], words: str
) -> None:
    if "no template" in changes:
        (model / "chat_template.jinja").unlink()
    if "no tensors" in changes:
        (model / "model.safetensors").unlink()
    if "no vocabulary" in changes:
        c = tiny_model(vocab_size=64, max_position_embeddings=128)
        write_folder(model, c, random_params(c), tmp_path / "tokenizer", (1,), 0)
    fields = {name: value for name, value in changes.items() if "." in name} or {"rollout.max_prompt_tokens": 70}
    with pytest.raises(error) as caught:
        make_preview(experiment(tmp_path, {"model.path": str(model), "rollout.max_prompt_tokens": 60, "batch.row_tokens": 200} | fields))
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("mesh.strategy=tp", "model.num_attention_heads=3"),
        ("mesh.strategy=fsdp", "model.hidden_size=33"),
    ],
)
def test_the_command_is_refused_in_one_line_and_leaves_no_run(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = tiny_run.Command(tmp_path, *arguments).wait()
    assert done.status == 2 and done.stderr.startswith("error: mesh.strategy = ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_questions_of_a_file_are_rendered_before_the_warm_start(tmp_path: Path) -> None:
    lines = [
        {"prompt": f"{number} and a great many words which the tokenizer spells letter by letter", "answer": "1"} for number in range(99)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = experiment(tmp_path, {"data.source": f"jsonl:{tmp_path / 'questions.jsonl'}"})
    items: Items = load_items(config)
    assert items.train
    with pytest.raises(DataError, match=r"questions\.jsonl, line \d+: the prompt has \d+ tokens, rollout\.max_prompt_tokens = 24"):
        make_preview(config)
