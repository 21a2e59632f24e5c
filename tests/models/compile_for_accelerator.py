"""Compiles one forward and backward pass for accelerators that are not there: TARGET ATTENTION REMAT, e.g. `h100 triton none`.

A process of its own with the environment of `accelerators.py`, as that must be set before JAX is imported. Prints JSON.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from compile_program import devices
from flax import nnx

from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Qwen2Config, build, declarations
from jaxprorl.sharding.mesh import batch_sharding, make_mesh, param_shardings

MODEL = Qwen2Config(1000, 1536, 1800, 6, 12, 2, 128, 1e4, 4096)  # heads of the 1.5B model
ROW_TOKENS = 2560  # no other dimension, nor a sum of some, has this size


target, attention, remat = sys.argv[1:]


def loss(params: Any, *ids: jax.Array) -> jax.Array:
    model: Any = nnx.merge(graphdef, params)
    return jnp.sum(model(*ids).astype(jnp.float32) ** 2)


mesh = make_mesh("fsdp", devices(target))
compute = Compute("bfloat16", attention, remat=remat, mesh=mesh)
graphdef = build(MODEL, compute)
shardings = param_shardings(MODEL, mesh, "fsdp")
params = {name: jax.ShapeDtypeStruct(d.shape, "float32", sharding=shardings[name]) for name, d in declarations(MODEL).items()}
ids = [jax.ShapeDtypeStruct((8, ROW_TOKENS), "int32", sharding=batch_sharding(mesh))] * 3
compiled = jax.jit(jax.grad(loss)).lower(params, *ids).compile()
text = compiled.as_text()
result = {
    "platform": compute.platform,
    "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    "kernels": text.count('custom_call_target="__gpu$xla.gpu.triton"') + text.count('custom_call_target="tpu_custom_call"'),
    "cudnn": text.count('custom_call_target="__cudnn$fmha'),
    "score_arrays": text.count(f"{ROW_TOKENS},{ROW_TOKENS}]"),
}
print(json.dumps(result))
