"""The device mesh and the shardings of everything that lives on it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax._src.xla_bridge import backends_are_initialized
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxprorl.errors import ConfigError
from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.sharding.strategies import AXES, BATCH_AXES, CONTEXT_AXIS, STRATEGIES, WHOLE, Table, mesh_sizes


def cpu_devices_there() -> int | None:
    """CPU devices of a process that has used JAX, which keeps them; None before that, and where it uses others."""
    if not backends_are_initialized():
        return None
    devices = jax.devices()
    return len(devices) if devices[0].platform == "cpu" else None


def set_cpu_devices(count: int) -> None:
    """Splits the host into so many JAX devices; more are left as they are, for whoever asked for them.

    Raises:
        ConfigError: JAX was used before, and has fewer.
    """
    there = cpu_devices_there()
    if there is not None and there < count:
        raise ConfigError(
            f"mesh.cpu_devices = {count}: JAX was used in this process before, and has {there} CPU device{'s' * (there > 1)} from then on. "
            f"Call jax.config.update('jax_num_cpu_devices', {count}) before the first JAX operation, or train before it, or set "
            f"mesh.cpu_devices = {there}"
        )
    if not backends_are_initialized() and jax.config.jax_num_cpu_devices < count:
        jax.config.update("jax_num_cpu_devices", count)


def run_devices(count: int) -> list[jax.Device]:
    """The devices of a run: `count` where they are the host's, else all."""
    devices = jax.devices()
    return devices[:count] if devices[0].platform == "cpu" else devices


def make_mesh(strategy: str, devices: list[jax.Device] | None = None, sizes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh over `devices`, None = all that there are. Neighbours in `devices` differ in the last axes first.

    Args:
        sizes: by axis, see `strategies.mesh_sizes`.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_sizes(strategy, sizes or {}, len(devices))
    return Mesh(np.array(devices).reshape([shape[axis] for axis in AXES]), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows split over the data axes; `leading` axes before the row axis stay whole."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, BATCH_AXES))


def token_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows split over the data axes, their tokens over the context axis."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, BATCH_AXES, CONTEXT_AXIS))


def partition_spec(axes: tuple[str | None, ...], table: Table) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes.

    Raises:
        ValueError: two dimensions of one array would use the same mesh axis.
    """
    mesh_axes = [table[axis] if axis else None for axis in axes]
    used = [axis for axis in mesh_axes if axis]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} map to {mesh_axes}: a mesh axis can split only one dimension of an array")
    return PartitionSpec(*mesh_axes)


def param_shardings(model_config: Qwen2Config, mesh: Mesh | AbstractMesh, strategy: str) -> dict[str, NamedSharding]:
    """Sharding of every parameter, by name.

    Raises:
        ConfigError: a dimension does not divide by the devices that it is split over; the table lacks or misnames an axis, takes one mesh
            axis twice in one array, or splits what devices with other tokens cannot share.
    """
    table = STRATEGIES[strategy].params
    shardings = table_shardings(model_config, mesh, strategy, table)
    for axis in ("vocab", "heads", "kv_heads"):  # what comes of their parts is summed, or stays apart, beside the same tokens
        name = table[axis]
        if name in (*BATCH_AXES, CONTEXT_AXIS) and mesh.shape[name] > 1:
            raise ConfigError(
                f"mesh.strategy = {strategy!r} splits {axis} over {name}, whose {mesh.shape[name]} devices have different tokens, so that "
                f"no one computes all of a token's {axis}; use 'tensor' or None for {axis}, and split 'embed' or 'mlp' over {name}"
            )
    return shardings


def moment_shardings(model_config: Qwen2Config, mesh: Mesh | AbstractMesh, strategy: str) -> dict[str, NamedSharding]:
    """Sharding of every parameter's gradient and optimizer moments, by name. They meet no tokens, so any axis may split them.

    Raises:
        ConfigError: as `table_shardings`.
    """
    return table_shardings(model_config, mesh, strategy, STRATEGIES[strategy].moments)


def table_shardings(model_config: Qwen2Config, mesh: Mesh | AbstractMesh, strategy: str, table: Table) -> dict[str, NamedSharding]:
    """Sharding of arrays shaped like the parameters, by name.

    Heads are never cut: query heads must divide by the devices that they are split over. Key-value heads, of which there are fewer, stay
    whole where they do not divide.

    Raises:
        ConfigError: a dimension does not divide by the devices that it is split over; the table lacks or misnames an axis, or takes one
            mesh axis twice in one array.
    """
    if table.keys() != WHOLE.keys():
        raise ConfigError(f"mesh.strategy = {strategy!r}: its table names the axes {sorted(table)}; it must name all of {sorted(WHOLE)}")
    for axis, mesh_axis in table.items():
        if mesh_axis is not None and mesh_axis not in AXES:
            raise ConfigError(f"mesh.strategy = {strategy!r} splits {axis} over {mesh_axis!r}, no mesh axis; use one of {AXES}, or None")
    c = model_config
    heads = {"heads": c.num_attention_heads, "kv_heads": c.num_key_value_heads}
    split = {axis: 1 if name is None else mesh.shape[name] for axis, name in table.items()}
    if heads["heads"] % split["heads"]:
        raise ConfigError(
            f"mesh.strategy = {strategy!r} splits {heads['heads']} attention heads over {split['heads']} devices along "
            f"{table['heads']}; use a number that divides them"
        )
    table = {axis: None if axis == "kv_heads" and heads[axis] % split[axis] else name for axis, name in table.items()}
    shardings = {}
    for name, declaration in declarations(c).items():
        try:
            spec = partition_spec(declaration.axes, table)
        except ValueError as error:
            raise ConfigError(f"mesh.strategy = {strategy!r}, {name}: {error}") from None
        for size, axis in zip(declaration.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ConfigError(
                    f"mesh.strategy = {strategy!r} splits {name} {declaration.shape} over {mesh.shape[axis]} devices along"
                    f" a dimension of {size}; use a device count that divides it, or another strategy"
                )
        shardings[name] = NamedSharding(mesh, spec)
    return shardings


def like_params(tree: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Shardings for an optimizer state: subtrees shaped like the parameters get `shardings`, everything else is replicated."""

    def follows(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == params.keys()

    return jax.tree.map(lambda node: shardings if follows(node) else replicated(mesh), tree, is_leaf=follows)
