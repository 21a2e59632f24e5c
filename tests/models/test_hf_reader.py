import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from factories import random_params, tiny_model
from model_folders import MODELS, edit_json, edit_tensors, shardings, split_in_two, write_index, written
from safetensors.numpy import load_file, save_file

from jaxprorl.errors import ModelError
from jaxprorl.models.hf import reader
from jaxprorl.models.hf.reader import check_tensors, read_params
from jaxprorl.models.hf.writer import write_folder
from jaxprorl.models.qwen2 import Qwen2Config, declarations, parameter_count

TIED = tiny_model()
NORM = "model.layers.1.input_layernorm.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path, TIED)


def refused(folder: Path, *words: str, c: Qwen2Config = TIED) -> None:
    """Both ways of reading refuse the folder, with these words."""
    for read in (lambda: read_params(folder, c, shardings(c)), lambda: check_tensors(folder, c)):
        with pytest.raises(ModelError) as caught:
            read()
        for word in (str(folder), *words):
            assert word in str(caught.value)


@pytest.mark.parametrize("chunk_bytes", [1, 300, reader.CHUNK_BYTES])
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("c", MODELS.values(), ids=MODELS)
def test_every_value_is_read_into_its_place(
    c: Qwen2Config, strategy: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the reads are cut: row by row, in pieces that do not divide the rows, at once."""
    monkeypatch.setattr(reader, "CHUNK_BYTES", chunk_bytes)
    folder, places = written(tmp_path, c), shardings(c, strategy)
    params = read_params(folder, c, places)
    assert params.keys() == random_params(c).keys()
    for name, value in random_params(c).items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)
        assert params[name].dtype == "float32"
        assert params[name].sharding == places[name]
    assert check_tensors(folder, c) == {"float32": parameter_count(c)}


def test_each_device_asks_the_file_for_its_own_part_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[slice, ...]]] = []
    read = reader._read
    monkeypatch.setattr(reader, "_read", lambda tensor, window: asked.append((tensor.key, window)) or read(tensor, window))
    read_params(model, TIED, shardings(TIED, "fsdp"))
    assert jax.device_count() == 2
    columns = [window[1] for key, window in asked if key == EMBED]
    assert columns == [slice(0, 16), slice(16, 32)]  # 48 x 32, split along the embedding's width
    rows = [window[0] for key, window in asked if key == "model.layers.1.mlp.down_proj.weight"]
    assert rows == [slice(0, 16), slice(16, 32)]  # stored as out x in, and out is the width


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_widened_exactly(model: Path, dtype: type) -> None:
    """All 65,536 bit patterns that are numbers, subnormals and both zeros included."""
    c = tiny_model(vocab_size=2048)
    edit_json(model / "config.json", vocab_size=2048)
    patterns = np.arange(65536, dtype=np.uint16).view(dtype)
    narrow = np.where(np.isfinite(patterns), patterns, dtype(0)).reshape(2048, 32)
    tensors = {key: value.astype(dtype) for key, value in load_file(model / "model.safetensors").items()} | {EMBED: narrow}
    save_file(tensors, model / "model.safetensors")
    embed = np.asarray(read_params(model, c, shardings(c))["embed"])
    bits = narrow.view(np.uint16).astype(np.uint32)
    if dtype is np.float16:
        sign, exponent, fraction = bits >> 15, (bits >> 10) & 31, bits & 1023
        expected = np.where(exponent == 0, fraction * 2.0**-24, (1024 + fraction) * 2.0 ** (exponent.astype(float) - 25))
        expected = np.where(sign == 1, -expected, expected).astype(np.float32)
    else:
        expected = (bits << 16).view(np.float32)  # bfloat16 is the upper half of float32
    np.testing.assert_array_equal(embed.view(np.uint32), expected.view(np.uint32))
    assert check_tensors(model, c) == {np.dtype(dtype).name: parameter_count(c)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({NORM: None}, ["missing", NORM]),
        ({"model.layers.2.input_layernorm.weight": np.ones(32, "f4")}, ["unknown", "model.layers.2.", "num_hidden_layers = 2"]),
        ({NORM: np.ones(31, "f4")}, ["model.safetensors", NORM, "(31,)", "(32,)"]),
        ({"model.layers.0.self_attn.q_proj.weight": np.ones((64, 32), "f4")}, ["q_proj", "(64, 32)", "(32, 32)"]),  # another head_dim
        ({NORM: np.full(32, np.nan, "f4")}, ["model.safetensors", NORM, "not finite"]),
        ({NORM: np.full(32, -np.inf, ml_dtypes.bfloat16)}, ["model.safetensors", NORM, "not finite"]),
        ({NORM: np.ones(32, "f8")}, ["model.safetensors", NORM, "F64", "F32, BF16, F16"]),
        ({NORM: np.ones(32, "i1")}, ["model.safetensors", NORM, "I8", "F32, BF16, F16"]),
    ],
    ids=["missing", "too_many_layers", "shape", "head_dim", "nan", "inf", "float64", "int8"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(model: Path, changes: dict[str, np.ndarray | None], words: list[str]) -> None:
    edit_tensors(model, changes)
    refused(model, *words)


def test_one_bad_value_anywhere_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", 300)
    tensors = load_file(model / "model.safetensors")
    for key in (EMBED, "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.bias"):
        value = tensors[key].copy()
        value.flat[-1] = np.nan
        edit_tensors(model, {key: value})
        refused(model, key, "not finite")
        edit_tensors(model, {key: tensors[key]})


def test_many_missing_tensors_are_counted_and_not_all_listed(model: Path) -> None:
    c = tiny_model(num_hidden_layers=3)
    refused(model, "missing tensors [model.layers.2.input_layernorm.weight, ", "… 12 in all", c=c)


def test_far_too_many_layers_are_refused_before_their_keys_are_listed(model: Path) -> None:
    refused(model, "num_hidden_layers = 1000000000000000, the files hold 26 tensors", c=tiny_model(num_hidden_layers=10**15))


def test_the_flag_decides_whether_the_head_is_the_embedding(model: Path, tmp_path: Path) -> None:
    embed = load_file(model / "model.safetensors")[EMBED]
    refused(model, "missing", HEAD, "tie_word_embeddings = false", c=tiny_model(tie_word_embeddings=False))

    edit_tensors(model, {HEAD: embed})  # tied, and saved twice: the same model
    params = read_params(model, TIED, shardings(TIED))
    assert "lm_head" not in params
    np.testing.assert_array_equal(params["embed"], random_params(TIED)["embed"])
    assert check_tensors(model, TIED) == {"float32": parameter_count(TIED)}

    other = embed.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))  # a model with a head of its own
    for head in (other, embed[:-1], embed.astype(np.float16)):
        edit_tensors(model, {HEAD: head})
        refused(model, HEAD, EMBED, "tie_word_embeddings = true")
    edit_tensors(model, {EMBED: None})
    refused(model, "missing", EMBED)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_refused_by_name(model: Path, kept_bytes: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    refused(model, "model.safetensors cannot be read")


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, "holds no *.safetensors")
    (model / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x02")
    refused(model, "pytorch_model-00001-of-00002.bin", "no *.safetensors", "save_pretrained")


def test_weights_in_several_files_are_read_with_and_without_an_index(model: Path) -> None:
    keys = split_in_two(model)
    places = {key: f"model-0000{1 if number < 5 else 2}-of-00002.safetensors" for number, key in enumerate(keys)}
    for index in (None, places):
        if index:
            write_index(model, index)
        for name, value in read_params(model, TIED, shardings(TIED)).items():
            np.testing.assert_array_equal(value, random_params(TIED)[name], err_msg=name)


def test_files_that_do_not_belong_together_are_refused(model: Path) -> None:
    keys = split_in_two(model)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    places = {key: first if number < 5 else second for number, key in enumerate(keys)}

    save_file({keys[7]: np.ones(3, "f4")}, model / "old.safetensors")
    refused(model, keys[7], second, "old.safetensors", "remove")
    (model / "old.safetensors").unlink()

    write_index(model, places | {keys[0]: second})
    refused(model, "index.json", keys[0], f"index: {second}, found in: {first}")
    write_index(model, places | {"more": first})
    refused(model, "index.json", "more", "found in: no file")
    write_index(model, {key: place for key, place in places.items() if key != keys[9]})
    refused(model, "index.json", keys[9], "index: nowhere")

    write_index(model, places)
    (model / second).unlink()
    refused(model, "index.json names files that are not there", second)
    maps = [3, {"a": ["b"]}, {"a": 3}]
    for text in ("{", "[]", "{}", "[" * 100_000, *(json.dumps({"weight_map": value}) for value in maps)):
        (model / "model.safetensors.index.json").write_text(text)
        refused(model, "index.json is not an index")


MEASURE = """
    import json, re, sys, threading, time
    from pathlib import Path
    import jax
    strategy, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2 if strategy == "fsdp" else 1)
    from jaxprorl.models import hf
    from jaxprorl.sharding.mesh import make_mesh, param_shardings

    def anonymous_bytes():
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    c = hf.read_config(folder)
    shardings = param_shardings(c, make_mesh(strategy), strategy)
    jax.block_until_ready(jax.device_put(0.0))
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch():
        global peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = hf.read_params(folder, c, shardings)
    done.set(); watcher.join()
    sizes = {name: sum(shard.data.nbytes for shard in array.addressable_shards) for name, array in params.items()}
    print(json.dumps({"peak": max(peak, anonymous_bytes()) - before, "sizes": sizes}))
    """


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells of anonymous memory in /proc")
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_reading_takes_the_memory_of_the_parameters_and_of_a_chunk(strategy: str, tmp_path: Path) -> None:
    """On CPU, where JAX takes the filled memory as it is; other devices need the host's copy of one stacked parameter in addition.

    What counts is memory of the process's own (RssAnon): pages of the mapped file are the kernel's cache, which it takes back at need.
    """
    c = tiny_model(
        vocab_size=32768, hidden_size=768, intermediate_size=3072, num_hidden_layers=8, head_dim=64, num_attention_heads=12,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    halves = {name: np.broadcast_to(np.float32(0.5), declaration.shape) for name, declaration in declarations(c).items()}
    (tmp_path / "tokenizer").mkdir()
    write_folder(tmp_path / "model", c, halves, tmp_path / "tokenizer", (0,), 0, dtype="bfloat16")
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), strategy, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    parameters, largest = sum(measured["sizes"].values()), max(measured["sizes"].values())
    assert 4e8 < 4 * parameter_count(c) <= parameters < 1.01 * 4 * parameter_count(c)  # norms are on every device
    slack = 3 * reader.CHUNK_BYTES + (16 << 20)  # a chunk as stored, in float32, and its mask; threads, handles, Python objects
    assert slack < largest / 2, "else a copy of the largest tensor in bfloat16 would go unnoticed"
    assert 0.9 * parameters < measured["peak"] <= parameters + slack, measured
