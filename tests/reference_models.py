"""Checkpoints made by transformers and read by our reader: the common ground of the parity tests."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprorl.models import hf
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Params, Qwen2Config, build, declarations

# What every reference script starts with. transformers computes norms, angles and softmax in float32 whatever the model's dtype; `widen`
# makes these casts, and nothing else, float64: precise enough to tell a wrong formula from rounding.
REFERENCE_START = """
import json
import torch
import transformers
from transformers.models.qwen2 import modeling_qwen2

def make(folder, config, seed):
    '''A checkpoint in which every part matters: no bias is zero, no norm is one, no softmax is flat.'''
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config))
    random = np.random.RandomState(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.from_numpy(random.standard_normal(tuple(parameter.shape)))
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    model.save_pretrained(folder)

def load(folder, dtype):
    return transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

class Widened:
    float = float32 = torch.float64
    def __getattr__(self, name):
        return getattr(torch, name)

def widen():
    modeling_qwen2.torch = Widened()
    torch.Tensor.float = torch.Tensor.double

def ids(array):
    return torch.from_numpy(np.asarray(array)).long()

folder, models = str(inputs["folder"]), json.loads(str(inputs["models"]))
"""


def transformers_models(models: Mapping[str, Qwen2Config]) -> str:
    """Arguments of transformers.Qwen2Config by model name, as JSON."""

    def arguments(c: Qwen2Config) -> dict[str, Any]:
        fields = dataclasses.asdict(c)
        return fields | {"rope_parameters": {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}}

    return json.dumps({name: arguments(c) for name, c in models.items()})


def read_checkpoint(folder: Path) -> tuple[Qwen2Config, Params]:
    """Shape and float32 parameters, on one device."""
    c = hf.read_config(folder)
    place = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    return c, hf.read_params(folder, c, dict.fromkeys(declarations(c), place))


def graphdef(c: Qwen2Config, dtype: str = "float32") -> nnx.GraphDef:
    return build(c, Compute(dtype))


def as_dtype(params: Params, dtype: str) -> Params:
    """Copies in another dtype; call it under `jax.enable_x64` for float64."""
    return {name: jnp.asarray(np.asarray(value), dtype) for name, value in params.items()}


def in_our_form(c: Qwen2Config, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by Hugging Face key, stacked and turned as our parameters are; every key is used once."""
    left, ours = dict(tensors), {}
    for name, declaration in declarations(c).items():
        layers = range(c.num_hidden_layers if declaration.axes[0] == "layers" else 1)
        parts = [left.pop(declaration.hf_name.format(layer=layer)) for layer in layers]
        parts = [part.T if declaration.transposed else part for part in parts]
        ours[name] = np.stack(parts) if declaration.axes[0] == "layers" else parts[0]
    assert not left
    return ours


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sequences placed into rows: what the model is asked, and where each sequence's answers stand."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    places: tuple[tuple[int, slice], ...]

    def answers(self, per_token_BS: np.ndarray) -> np.ndarray:
        """Of all sequences in their order, one after the other, without padding."""
        return np.concatenate([per_token_BS[place] for place in self.places])


def place_rows(sequences: Sequence[np.ndarray], places: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Rows:
    """Sequence i starts at `places[i]` = (row, column); positions count from 0 in each; the padding holds token 7 at position 3."""
    tokens, positions, segments = np.full(shape, 7), np.full(shape, 3), np.zeros(shape, int)
    slices = []
    for segment, (ids, (row, start)) in enumerate(zip(sequences, places, strict=True), start=1):
        here = row, slice(start, start + len(ids))
        assert not segments[here].any()
        tokens[here], positions[here], segments[here] = ids, np.arange(len(ids)), segment
        slices.append(here)
    return Rows(tokens, positions, segments, tuple(slices))


def report(what: str, difference: float, limit: float) -> None:
    """Prints a measured difference (seen with `pytest -s`) and holds it against its limit."""
    print(f"parity | {what} | {difference:.1e} | <= {limit:.1e}")
    assert difference <= limit, f"{what}: {difference:.3e} > {limit:.3e}"
