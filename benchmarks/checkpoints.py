"""What a checkpoint costs: the time the loop is held up, the time until it is committed, reading it back, and its size.

python benchmarks/checkpoints.py [--config=FILE --config.FIELD=VALUE ...]     (default: configs/quickstart.py)

The state has the config's shapes and random values; while a checkpoint is being written, donated updates of it go on, as in the loop.
"""

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxprorl import commit
from jaxprorl import config as config_module
from jaxprorl.checkpoint import Checkpoints, Host, newest_sound_step, restore_state
from jaxprorl.errors import UserError
from jaxprorl.models.qwen2 import Qwen2Config, init_params
from jaxprorl.sharding.mesh import make_mesh, set_cpu_devices
from jaxprorl.sizes import with_cpu_devices
from jaxprorl.state import RunState, abstract_state, start_state, state_shardings

VOCABULARY = 320  # of the quickstart's tokenizer
SAVES = 20


def shape(config: ConfigDict) -> Qwen2Config:
    """The warm-start model's shape."""
    m = config.model
    return Qwen2Config(
        VOCABULARY, m.hidden_size, m.intermediate_size, m.num_hidden_layers, m.num_attention_heads, m.num_key_value_heads, m.head_dim,
        m.rope_theta, m.max_position_embeddings,
    )  # fmt: skip


def main(argv: list[str]) -> None:
    """Prints one line per quantity: median and worst of 20 saves (the first one, which starts Orbax's threads, is not counted)."""
    config = config_module.load(argv or [f"--config={ROOT / 'configs/quickstart.py'}"])
    config_module.validate(config)
    set_cpu_devices(with_cpu_devices(config).mesh.cpu_devices)
    mesh, model = make_mesh(config.mesh.strategy), shape(config)
    shardings = state_shardings(config, model, mesh)
    params = jax.jit(lambda: init_params(model, 0), out_shardings=shardings.params)()
    noise = np.random.RandomState(0)  # Orbax compresses: zeros would take no room
    state = jax.tree.map(
        lambda x: jax.device_put(noise.standard_normal(x.shape).astype(x.dtype), x.sharding), start_state(config, params, shardings)
    )
    abstract = abstract_state(config, params, shardings)
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0, out_shardings=shardings).lower(state).compile()
    blocking_ms, total_ms, restore_ms, verify_ms = [], [], [], []
    with tempfile.TemporaryDirectory(dir=ROOT) as folder, Checkpoints(Path(folder), config) as checkpoints:
        for step in range(SAVES + 1):
            state = jax.block_until_ready(update(state))
            started_s = time.perf_counter()
            checkpoints.save(state, Host(RunState(step=step), {}, {}))
            blocking_ms.append(1e3 * (time.perf_counter() - started_s))
            state = update(state)
            checkpoints.wait()
            total_ms.append(1e3 * (time.perf_counter() - started_s))
        for _ in range(5):
            started_s = time.perf_counter()
            newest_sound_step(Path(folder), "stop")
            verify_ms.append(1e3 * (time.perf_counter() - started_s))
            started_s = time.perf_counter()
            jax.block_until_ready(restore_state(Path(folder), SAVES, abstract))
            restore_ms.append(1e3 * (time.perf_counter() - started_s))
        size = commit.read_record(Path(folder), SAVES).bytes
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"arrays {arrays / 1e6:.2f} MB, on disk {size / 1e6:.2f} MB")
    measured = {"save, the loop waits": blocking_ms[1:], "save, until committed": total_ms[1:]}
    for name, values in (measured | {"digests checked": verify_ms, "restored": restore_ms}).items():
        print(f"{name}: {np.median(values):.1f} ms, at most {max(values):.1f} ms")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
