"""What the trainer puts into the weight segment, against what the writer of Hugging Face folders writes."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from factories import random_params, tiny_model

from jaxprorl.models.hf.writer import tensors
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.rollout import segments, weights
from jaxprorl.rollout.weights import WeightChannel, layout, pieces
from jaxprorl.rollout.weights_segment import WeightReader
from jaxprorl.sharding.mesh import make_mesh, param_shardings

TIED, UNTIED = tiny_model(), tiny_model(tie_word_embeddings=False)


def sharded(c: Qwen2Config, params: dict[str, np.ndarray], strategy: str) -> dict[str, jax.Array]:
    return jax.device_put(params, param_shardings(c, make_mesh(strategy), strategy))


@pytest.mark.parametrize("c", [TIED, UNTIED], ids=["tied", "untied"])
def test_tensors_come_layer_by_layer_and_each_once(c: Qwen2Config) -> None:
    names = [piece.hf_name for piece in pieces(c)]
    assert sorted(names) == sorted(key for key, _ in tensors(c, random_params(c), "float32"))
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers) == [0] * 12 + [1] * 12
    outside = [name for name in names if not name.startswith("model.layers.")]
    assert names[0] == "model.embed_tokens.weight"
    assert names[25:] == outside[1:] == ["model.norm.weight"] + ["lm_head.weight"] * (c is UNTIED)


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_workers_read_what_a_model_folder_would_hold(strategy: str, dtype: str, tmp_path: Path) -> None:
    versions = {version: random_params(UNTIED, seed=version) for version in (1, 2, 3)}
    channel = WeightChannel(UNTIED, make_mesh(strategy), dtype, tmp_path, tmp_path)
    try:
        channel.compile(sharded(UNTIED, versions[1], strategy))
        memory = segments.attach(channel.path)
        reader = WeightReader(memory.buffer)
        for version, params in versions.items():
            channel.write(sharded(UNTIED, params, strategy), version)
            expected = dict(tensors(UNTIED, params, dtype))
            with reader.version(version) as found:
                assert [tensor.name for tensor in found] == [piece.hf_name for piece in pieces(UNTIED)]
                for tensor in found:
                    value = tensor.array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else tensor.array
                    np.testing.assert_array_equal(value, expected[tensor.name])
        assert channel.size_bytes == sum(value.nbytes for value in expected.values())
        del value, tensor, found  # views into the segment
        reader.close()
        memory.close()
    finally:
        channel.close()
    assert list(tmp_path.iterdir()) == []


def test_the_version_before_stays_readable_while_the_next_is_written(tmp_path: Path) -> None:
    params = sharded(TIED, random_params(TIED), "dp")
    channel = WeightChannel(TIED, make_mesh("dp"), "float32", tmp_path, tmp_path)
    channel.compile(params)
    channel.write(params, 1)
    reader = WeightReader(segments.attach(channel.path).buffer)
    with reader.version(1) as found:
        before = found[0].array.copy()
        channel.write(sharded(TIED, random_params(TIED, seed=9), "dp"), 2)
        np.testing.assert_array_equal(found[0].array, before)
    channel.close()


def test_the_layout_holds_whole_tensors() -> None:
    specs = layout(TIED, "bfloat16")
    ends = [spec.offset_bytes + spec.size_bytes for spec in specs]
    assert all(end <= spec.offset_bytes for end, spec in zip(ends, specs[1:], strict=False))


def test_ctrl_c_while_the_channel_is_made_leaves_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "WeightWriter", interrupt)
    with pytest.raises(KeyboardInterrupt):
        WeightChannel(TIED, make_mesh("dp"), "float32", segments.SHARED_MEMORY, run_folder)
