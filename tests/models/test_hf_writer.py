import errno
import itertools
import json
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import pytest
from factories import QUICK_COMPILE, random_params, tiny_model
from flax import nnx
from model_folders import MODELS, shardings, written
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxprorl.errors import ModelError
from jaxprorl.files import scratch_in
from jaxprorl.models import qwen2
from jaxprorl.models.compute import Compute
from jaxprorl.models.hf import writer
from jaxprorl.models.hf.config import read_config
from jaxprorl.models.hf.reader import read_params
from jaxprorl.models.hf.writer import plan_shards, write_folder
from jaxprorl.models.qwen2 import Qwen2Config, declarations, parameter_count
from jaxprorl.warmstart.tokenizer import build_tokenizer

TIED = tiny_model()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path, TIED)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("c", MODELS.values(), ids=MODELS)
def test_read_and_written_again_is_the_same_bit_for_bit(c: Qwen2Config, strategy: str, dtype: str, tmp_path: Path) -> None:
    folder = written(tmp_path, c, dtype=dtype, shard_bytes=9000)
    assert read_config(folder) == c
    params = read_params(folder, c, shardings(c, strategy))
    write_folder(tmp_path / "again", c, params, folder, stop_ids=(2, 1), pad_id=0, dtype=dtype, shard_bytes=9000)  # type: ignore[arg-type]
    assert contents(tmp_path / "again") == contents(folder)
    assert len(contents(folder)) > 5


def test_the_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    c = MODELS["untied"]
    params = random_params(c)
    tensors = load_file(written(tmp_path, c) / "model.safetensors")
    assert len(tensors) == 3 + 12 * 2
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["lm_head"])
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.down_proj.weight"], params["down_kernel"][1].T)
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.k_proj.bias"], params["k_bias"][0])
    with safe_open(tmp_path / "model/model.safetensors", framework="numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    header = int.from_bytes((tmp_path / "model/model.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0  # so that tensors start aligned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_are_filled_up_to_the_limit_and_listed_in_the_index(dtype: str, tmp_path: Path) -> None:
    folder, size = written(tmp_path, TIED, dtype=dtype, shard_bytes=9000), 4 if dtype == "float32" else 2
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: load_file(folder / name) for name in files}
    assert index["metadata"] == {"total_size": size * parameter_count(TIED)}
    assert index["weight_map"] == {key: name for name, tensors in held.items() for key in tensors}
    sizes = [sum(value.nbytes for value in held[name].values()) for name in files]
    assert max(sizes) <= 9000
    plan = plan_shards(TIED, dtype, 9000)
    for name, following in itertools.pairwise(files):
        assert sum(entry.bytes for entry in plan[name]) + plan[following][0].bytes > 9000, "the next tensor would have fitted"


def test_a_tensor_above_the_limit_has_a_file_of_its_own() -> None:
    plan = plan_shards(TIED, "float32", 1)
    assert all(len(entries) == 1 for entries in plan.values())
    assert len(plan) == 2 + 12 * 2
    assert list(plan_shards(TIED, "float32", 10**9)) == ["model.safetensors"]


def test_config_has_the_names_of_both_transformers_and_the_ids(tmp_path: Path) -> None:
    raw = json.loads((written(tmp_path, MODELS["untied"], dtype="bfloat16", bos_id=7) / "config.json").read_text())
    assert raw["torch_dtype"] == raw["dtype"] == "bfloat16"
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1e6
    assert (raw["eos_token_id"], raw["pad_token_id"], raw["bos_token_id"]) == ([2, 1], 0, 7)
    assert raw["tie_word_embeddings"] is False


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, in integers: add half of the last kept place, less one if that place is even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


HARD = np.array(
    [
        0x3F808000, 0x3F818000,  # ties: down to even, up to even
        0x3F807FFF, 0x3F808001, 0x3F817FFF, 0x3F818001,  # right beside them
        0xBF808000, 0xBF818000,
        0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x007FFFFF, 0x80018000,  # subnormals, the last one rounding to a normal one
        0x00000000, 0x80000000,
        0x3FFF8000, 0x40FFFFFF,  # carries into the exponent
        0x7F7F7FFF, 0x7F7F0000,  # the largest that stay finite
    ],
    dtype=np.uint32,
)  # fmt: skip


def with_hard_values(c: Qwen2Config) -> dict[str, np.ndarray]:
    params = random_params(c)
    params["embed"].flat[: len(HARD)] = HARD.view(np.float32)
    params["up_kernel"].flat[-len(HARD) :] = HARD.view(np.float32)
    return params


def test_float32_is_rounded_to_the_nearest_bfloat16_ties_to_even(tmp_path: Path) -> None:
    params = with_hard_values(TIED)
    write_folder(tmp_path / "model", TIED, params, tmp_path, (0,), 0, dtype="bfloat16")
    tensors = load_file(tmp_path / "model/model.safetensors")
    assert {str(value.dtype) for value in tensors.values()} == {"bfloat16"}
    embed = tensors["model.embed_tokens.weight"].view(np.uint16)
    np.testing.assert_array_equal(embed, bfloat16_bits(params["embed"]))
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.up_proj.weight"].T.view(np.uint16), bfloat16_bits(params["up_kernel"][1]))
    assert [hex(bits) for bits in embed.flat[:2]] == ["0x3f80", "0x3f82"]  # by hand


def test_a_bfloat16_model_goes_through_training_precision_unchanged(tmp_path: Path) -> None:
    """Every finite bit pattern."""
    c = tiny_model(vocab_size=2048)
    patterns = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    embed = np.where(np.isfinite(patterns), patterns, ml_dtypes.bfloat16(1)).reshape(2048, 32)
    folder = written(tmp_path, c, dtype="bfloat16")
    source = load_file(folder / "model.safetensors") | {"model.embed_tokens.weight": embed}
    save_file(source, folder / "model.safetensors")
    params = read_params(folder, c, shardings(c))
    write_folder(tmp_path / "again", c, params, folder, stop_ids=(2, 1), pad_id=0, dtype="bfloat16")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == source.keys()
    for key, value in source.items():
        np.testing.assert_array_equal(again[key].view(np.uint16), value.view(np.uint16), err_msg=key)


def test_only_what_belongs_to_a_tokenizer_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "merges.txt", "vocab.json"}
    others = {"config.json", "model.safetensors", "pytorch_model.bin", "README.md", "trainer_state.json", "model.safetensors.index.json"}
    for name in copied | others:
        (source / name).write_text(f"the source's {name}")
    write_folder(tmp_path / "model", TIED, random_params(TIED), source, (0,), 0, texts={"README.md": "a card"})
    found = contents(tmp_path / "model")
    assert found.keys() == copied | {"config.json", "model.safetensors", "README.md"}
    assert all(found[name] == f"the source's {name}".encode() for name in copied)
    assert found["README.md"] == b"a card"


def test_writing_replaces_an_older_folder_whole(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").write_text("left over from an older model")
    write_folder(model, TIED, random_params(TIED, seed=5), model, stop_ids=(1,), pad_id=0)
    assert contents(model).keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    np.testing.assert_array_equal(read_params(model, TIED, shardings(TIED))["embed"], random_params(TIED, seed=5)["embed"])
    assert sorted(path.name for path in model.parent.iterdir()) == ["model", "tokenizer"]


def test_a_full_disk_leaves_the_older_folder_and_nothing_else(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(model)

    class Params(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            if name == "gate_kernel":  # half of the file is written by then
                assert scratch_in(model.parent)
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().__getitem__(name)

    with pytest.raises(ModelError, match=r"model cannot be written: .*No space left on device"):
        write_folder(model, TIED, Params(random_params(TIED)), model, (0,), 0)
    assert contents(model) == before
    assert sorted(path.name for path in model.parent.iterdir()) == ["model", "tokenizer"]

    usage = shutil.disk_usage(model)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage._replace(free=4 * parameter_count(TIED) - 1))
    with pytest.raises(ModelError, match=r"model cannot be written: it needs 81\.0 kB, 81\.0 kB are free"):
        write_folder(model, TIED, random_params(TIED), model, (0,), 0)
    assert contents(model) == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"file/model cannot be written"):
        write_folder(tmp_path / "file/model", TIED, random_params(TIED), tmp_path, (0,), 0)


def test_each_parameter_is_asked_for_once_and_let_go_before_the_next(tmp_path: Path) -> None:
    asked: list[str] = []
    given: list[weakref.ref[jax.Array]] = []

    class Params(Mapping[str, jax.Array]):
        def __getitem__(self, name: str) -> jax.Array:
            assert all(reference() is None for reference in given)
            asked.append(name)
            array = jax.device_put(random_params(TIED)[name])
            given.append(weakref.ref(array))
            return array

        def __iter__(self) -> Iterator[str]:
            return iter(declarations(TIED))

        def __len__(self) -> int:
            return len(declarations(TIED))

    write_folder(tmp_path / "model", TIED, Params(), tmp_path, (0,), 0, shard_bytes=5000)
    assert asked == list(declarations(TIED))


def logits(c: Qwen2Config, params: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    def forward(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        model = nnx.merge(qwen2.build(c, Compute()), params)
        positions = jax.numpy.broadcast_to(jax.numpy.arange(tokens.shape[1]), tokens.shape)
        return model(tokens, positions, jax.numpy.ones_like(tokens)) @ model.head().T

    return np.asarray(jax.jit(forward, compiler_options=QUICK_COMPILE)(params, tokens))


@pytest.mark.slow
def test_transformers_loads_ours_and_we_load_what_it_saves(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    """One file and several with an index, float32 and bfloat16: no key missing or left over, the same values, the same logits."""
    script = """
        import torch
        from transformers import AutoModelForCausalLM
        for name in str(inputs["names"]).split(","):
            folder = f"{inputs['folder']}/{name}"
            model, report = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype="auto", output_loading_info=True)
            outputs[name + ".problems"] = np.array([len(value) for value in report.values()])
            outputs[name + ".eos"] = np.array(model.generation_config.eos_token_id)
            outputs[name + ".dtype"] = np.array(str(model.dtype))
            model.float()
            with torch.no_grad():
                outputs[name + ".logits"] = model(torch.from_numpy(inputs["tokens"])).logits.numpy()
            for key, value in model.state_dict().items():
                outputs[name + "/" + key] = value.numpy()
            model.save_pretrained(f"{folder}/again")
            model.to(torch.bfloat16).save_pretrained(f"{folder}/half", max_shard_size="20KB")
        values = torch.from_numpy(inputs["values"])
        outputs["rounded"] = values.to(torch.bfloat16).view(torch.int16).numpy()
        """
    variants = {
        f"{name}-{dtype}-{size}": (c, dtype, size) for name, c in MODELS.items() for dtype in writer.DTYPES for size in (9000, 10**9)
    }
    for name, (c, dtype, size) in variants.items():
        (tmp_path / name).mkdir()
        written(tmp_path / name, c, dtype=dtype, shard_bytes=size)
    tokens = np.random.RandomState(1).randint(0, 48, (2, 16))
    values = with_hard_values(TIED)["embed"]
    reference = run_reference(script, names=",".join(variants), folder=str(tmp_path), tokens=tokens, values=values)
    np.testing.assert_array_equal(reference["rounded"].view(np.uint16), bfloat16_bits(values))
    for name, (c, dtype, _) in variants.items():
        folder = tmp_path / name
        assert not reference[f"{name}.problems"].any(), name  # no missing, unexpected or mismatched keys
        assert str(reference[f"{name}.dtype"]) == f"torch.{dtype}"
        np.testing.assert_array_equal(reference[f"{name}.eos"], [2, 1])
        params = {key: value.astype(dtype).astype("f4") for key, value in random_params(c).items()}
        np.testing.assert_array_equal(reference[f"{name}/model.embed_tokens.weight"], params["embed"])
        np.testing.assert_array_equal(reference[f"{name}/model.layers.1.mlp.down_proj.weight"], params["down_kernel"][1].T)
        np.testing.assert_array_equal(reference[f"{name}/model.layers.0.self_attn.k_proj.bias"], params["k_bias"][0])
        expected, scale = reference[f"{name}.logits"], np.abs(reference[f"{name}.logits"]).max()
        np.testing.assert_allclose(logits(c, params, tokens), expected, rtol=0, atol=2e-5 * scale, err_msg=name)  # float32's own error
        for place, saved in (("again", "float32"), ("half", "bfloat16")):
            assert read_config(folder / place) == c
            for key, value in read_params(folder / place, c, shardings(c)).items():
                np.testing.assert_array_equal(value, params[key].astype(saved).astype("f4"), err_msg=f"{name} {place} {key}")
        assert (folder / "half/model.safetensors.index.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_loads_ours_and_decodes_the_same_tokens(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    """Real vLLM on CPU, computing in float32: tied, untied and bfloat16, in several files. Heads of 32 are its narrowest."""
    script = """
        from vllm import LLM, SamplingParams
        sampling = SamplingParams(temperature=0.0, max_tokens=int(inputs["new_tokens"]), ignore_eos=True)
        prompts = [{"prompt_token_ids": row.tolist()} for row in inputs["tokens"]]
        llm = LLM(model=str(inputs["folder"]), dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8,
                  kv_cache_memory_bytes=32 << 20)
        outputs["tokens"] = np.array([out.outputs[0].token_ids for out in llm.generate(prompts, sampling, use_tqdm=False)])
        """
    tokenizer = build_tokenizer([], tmp_path / "tokenizer")
    variants: list[tuple[bool, Literal["float32", "bfloat16"]]] = [(True, "float32"), (False, "bfloat16")]
    for tied, dtype in variants:
        c = tiny_model(
            vocab_size=tokenizer.vocab_size, hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1, rope_theta=1e6,
            tie_word_embeddings=tied,
        )  # fmt: skip
        folder = tmp_path / f"model-{tied}"
        params = {name: value.astype(dtype).astype("f4") for name, value in random_params(c).items()}
        write_folder(folder, c, params, tokenizer.path, tokenizer.stop_ids, tokenizer.pad_id, dtype=dtype, shard_bytes=40_000)
        assert (folder / "model.safetensors.index.json").is_file()
        tokens = np.random.RandomState(2).randint(0, c.vocab_size, (4, 12))
        reference = run_reference(script, timeout_s=400, folder=str(folder), tokens=tokens, new_tokens=16)
        answers = np.concatenate([tokens, reference["tokens"]], axis=1)
        ours = logits(c, params, answers)[:, 11:-1]
        np.testing.assert_array_equal(ours.argmax(-1), reference["tokens"], err_msg=f"tied = {tied}")
        second = np.partition(ours, -2, axis=-1)[..., -2]
        assert (ours.max(-1) - second).min() > 1e-4 * np.abs(ours).max(), "no tie that float32's rounding could decide"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3.4e38, "1 of 32 values, the first at [5]: 3.3999999521443642e+38, overflow in bfloat16, whose largest number is 3.39e+38; write"),
        (-3.4e38, "1 of 32 values, the first at [5]: -3.3999999521443642e+38, overflow in bfloat16"),
        (np.nan, "1 of 32 values, the first at [5]: nan, are not finite"),
        (np.inf, "1 of 32 values, the first at [5]: inf, are not finite"),
    ],
)
def test_a_value_that_the_output_cannot_hold_is_refused_by_tensor(value: float, words: str, tmp_path: Path) -> None:
    params = random_params(TIED)
    params["final_norm"][5] = value
    with pytest.raises(ModelError) as caught:
        write_folder(tmp_path / "model", TIED, params, tmp_path, (0,), 0, dtype="bfloat16")
    assert str(caught.value).startswith("model.norm.weight: ") and words.split(": ")[0] in str(caught.value)
    assert words.rpartition(", ")[2] in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_float32_holds_what_bfloat16_cannot(tmp_path: Path) -> None:
    params = random_params(TIED)
    params["final_norm"][5] = 3.4e38
    write_folder(tmp_path / "model", TIED, params, tmp_path, (0,), 0)
    np.testing.assert_array_equal(read_params(tmp_path / "model", TIED, shardings(TIED))["final_norm"], params["final_norm"])
