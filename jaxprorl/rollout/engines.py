"""Which engine a run samples with: the only place that knows both."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.rollout.engine import Engine
from jaxprorl.rollout.jax_engine import JaxEngine
from jaxprorl.rollout.vllm_engine import VllmEngine


def make_engine(
    config: ConfigDict,
    model_config: Qwen2Config,
    mesh: Mesh,
    stop_ids: Sequence[int],
    run_folder: Path,
    note: Callable[[str], None],
) -> Engine:
    """The engine of `config.rollout.engine`; call its `close` in the end.

    Args:
        stop_ids: token ids that end a completion.
        run_folder: `base_model` in it holds config.json; logs of workers go there.
        note: tells the user something.

    Raises:
        SharedMemoryError: too little shared memory and disk for vLLM's workers.
    """
    if config.rollout.engine == "vllm":
        return VllmEngine(config, model_config, mesh, stop_ids, run_folder, note)
    return JaxEngine(config, model_config, mesh, stop_ids)
