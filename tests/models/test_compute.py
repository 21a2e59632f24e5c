import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from factories import tiny_config

from jaxprorl.errors import ConfigError
from jaxprorl.models.attention import packed_attention
from jaxprorl.models.compute import ATTENTION, Compute, automatic_compute, choose_compute
from jaxprorl.sharding.mesh import make_mesh

ROOT = Path(__file__).resolve().parents[2]


def mesh_of(platform: str, data: int = 2, fsdp: int = 1, context: int = 1) -> Any:
    devices = np.array([SimpleNamespace(platform=platform)] * (data * fsdp * context))
    return SimpleNamespace(devices=devices, shape={"data": data, "fsdp": fsdp, "tensor": 1, "context": context})


@pytest.mark.parametrize(
    ("platform", "row_tokens", "head_dim", "expected"),
    [
        ("cpu", 96, 32, "naive"),
        ("cpu", 256, 128, "naive"),
        ("cpu", 257, 128, "chunked"),
        ("gpu", 128, 80, "naive"),  # one chunk
        ("gpu", 129, 80, "chunked"),
        ("gpu", 2048, 128, "triton"),
        ("cuda", 2048, 64, "triton"),
        ("gpu", 2000, 128, "chunked"),  # no multiple of the kernel's block
        ("gpu", 2048, 80, "chunked"),
        ("gpu", 96, 128, "naive"),
        ("tpu", 2048, 128, "splash"),
        ("tpu", 2048, 32, "chunked"),
    ],
)
def test_auto_is_the_platforms_kernel_where_the_shapes_fit(platform: str, row_tokens: int, head_dim: int, expected: str) -> None:
    config = tiny_config(batch__row_tokens=row_tokens, model__dtype="bfloat16", model__remat="dots")
    mesh = mesh_of(platform)
    shared = expected == "naive"
    assert choose_compute(config, head_dim, mesh) == Compute("bfloat16", expected, 128, "dots", mesh, shared_prompts=shared)
    for field in ("share_prompts", "packing"):
        apart = tiny_config(**{"batch__row_tokens": row_tokens, f"batch__{field}": False})
        assert not choose_compute(apart, head_dim, mesh).shared_prompts
    config.warmstart.row_tokens = row_tokens
    assert automatic_compute(config, head_dim, "warmstart", mesh).attention == expected


@pytest.mark.parametrize(
    ("row_tokens", "changes", "expected"),
    [
        (579, {}, "naive"),
        (580, {}, "chunked"),  # more than three of the longest sequences
        (579, {"rollout__max_prompt_tokens": 60}, "chunked"),  # less than a third of them
        (640, {"rollout__max_prompt_tokens": 90}, "naive"),
        (641, {"rollout__max_prompt_tokens": 90}, "chunked"),
        (579, {"batch__share_prompts": False}, "chunked"),
        (579, {"batch__packing": False}, "chunked"),
    ],
)
def test_shared_prompts_keep_longer_rows_naive_on_cpus(row_tokens: int, changes: dict[str, Any], expected: str) -> None:
    lengths = {"rollout__max_prompt_tokens": 65, "rollout__max_response_tokens": 128}
    config = tiny_config(**{"batch__row_tokens": row_tokens} | lengths | changes)
    assert choose_compute(config, 128, mesh_of("cpu")).attention == expected
    assert choose_compute(config, 80, mesh_of("gpu")).attention == "chunked"
    config.warmstart.row_tokens = row_tokens
    assert automatic_compute(config, 128, "warmstart", mesh_of("cpu")).attention == "chunked"


def test_a_longer_chunk_keeps_longer_rows_naive() -> None:
    config = tiny_config(batch__row_tokens=512, model__attention_chunk_tokens=512)
    assert choose_compute(config, 128, mesh_of("cpu")).attention == "naive"


@pytest.mark.parametrize(
    ("row_tokens", "expected"),
    [(96, "naive"), (256, "chunked"), (512, "chunked"), (192, "chunked"), (384, "naive"), (386, "naive")],  # 192, 193: not in chunks of 128
)
def test_auto_takes_parts_of_rows_that_fit_the_chunks_or_naive(row_tokens: int, expected: str) -> None:
    config = tiny_config(batch__row_tokens=row_tokens, mesh__strategy="fsdp_cp")
    assert choose_compute(config, 128, mesh_of("gpu", context=2)).attention == expected


@pytest.mark.parametrize("row_tokens", [97, 193])
def test_auto_refuses_rows_that_the_context_axis_cannot_cut(row_tokens: int) -> None:
    config, mesh = tiny_config(mesh__strategy="fsdp_cp"), mesh_of("cpu", context=2)
    for section in ("batch", "warmstart"):
        config[section].row_tokens = row_tokens
        with pytest.raises(ConfigError) as caught:
            automatic_compute(config, 128, section, mesh)
        said = f"{section}.row_tokens = {row_tokens} does not divide by mesh.context = 2; {row_tokens + 1} does"
        assert str(caught.value) == f"model.attention = 'auto': {said}"


@pytest.mark.parametrize(
    ("name", "platform", "changes", "head_dim", "reason"),
    [
        ("splash", "cpu", {}, 128, "it runs on TPUs only, these devices are CPUs"),
        ("splash", "gpu", {}, 128, "it runs on TPUs only, these devices are GPUs"),
        ("triton", "cpu", {}, 128, "it runs on GPUs only, these devices are CPUs"),
        ("cudnn", "tpu", {"batch__packing": False}, 128, "it runs on GPUs only, these devices are TPUs"),
        ("triton", "gpu", {"batch__row_tokens": 300}, 128, "batch.row_tokens = 300 is no multiple of 128, its block; 384 is"),
        ("splash", "tpu", {"batch__row_tokens": 96}, 128, "batch.row_tokens = 96 is no multiple of 128, its block; 128 is"),
        ("triton", "gpu", {}, 80, "it needs heads of 16, 32, 64 or 128; the model's head_dim is 80"),
        ("splash", "tpu", {}, 32, "it needs heads of 64, 128 or 256; the model's head_dim is 32"),
        ("cudnn", "gpu", {}, 128, "batch.packing = True puts several sequences into a row; set batch.packing = False"),
        ("cudnn", "gpu", {"batch__packing": False, "model__dtype": "float32"}, 128, "it needs model.dtype = 'bfloat16', not 'float32'"),
        ("cudnn", "gpu", {"batch__packing": False}, 136, "it needs heads of a multiple of 8, 128 at most; the model's head_dim is 136"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(name: str, platform: str, changes: dict[str, Any], head_dim: int, reason: str) -> None:
    config = tiny_config(**{"batch__row_tokens": 1024, "model__dtype": "bfloat16", "model__attention": name} | changes)
    with pytest.raises(ConfigError) as caught:
        choose_compute(config, head_dim, mesh_of(platform))
    message = str(caught.value)
    assert message.startswith(f"model.attention = '{name}': ") and reason in message and message.endswith("'chunked' runs anywhere")


def test_what_can_run_is_taken_as_it_is_named() -> None:
    for name, platform, changes in (
        ("naive", "gpu", {}),
        ("chunked", "cpu", {}),
        ("triton", "gpu", {}),
        ("splash", "tpu", {}),
        ("cudnn", "gpu", {"batch__packing": False, "model__dtype": "bfloat16"}),
    ):
        config = tiny_config(**{"batch__row_tokens": 1024, "model__attention": name} | changes)
        assert choose_compute(config, 64, mesh_of(platform)).attention == name


def test_rows_must_divide_by_the_devices_that_share_them() -> None:
    with pytest.raises(ConfigError, match=r"batch\.micro_batch_rows = 4: must divide by the 3 devices"):
        choose_compute(tiny_config(), 8, mesh_of("gpu", data=3))
    choose_compute(tiny_config(), 8, mesh_of("gpu", data=2, fsdp=2))


def test_how_to_compute_is_hashable_with_its_mesh() -> None:
    mesh = make_mesh("dp")
    assert len({Compute(mesh=mesh), Compute(mesh=make_mesh("dp")), Compute(), Compute(remat="full")}) == 3
    assert Compute().platform == Compute(mesh=mesh).platform == "cpu"


@pytest.mark.timeout(120)
def test_kernels_are_loaded_only_when_they_are_asked_for() -> None:
    program = (
        "import sys, jaxprorl.start, jaxprorl.models.kernels\n"
        "print([name for name in sys.modules if name.startswith('jax.experimental.pallas.ops')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_name_is_one_that_attention_knows() -> None:
    q = jax.ShapeDtypeStruct((2, 128, 1, 64), "float32")
    ids = jax.ShapeDtypeStruct((2, 128), "int32")
    for name in set(ATTENTION) - {"cudnn"}:  # which looks for its library
        compute = Compute(attention=name, mesh=make_mesh("dp"))
        shape = jax.eval_shape(lambda q, ids, compute=compute: packed_attention(compute, ids)(q, q, q), q, ids)
        assert shape.shape == q.shape, name
