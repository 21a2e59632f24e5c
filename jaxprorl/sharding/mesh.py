"""The device mesh and the shardings of everything that lives on it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.sharding.strategies import BATCH_AXES, STRATEGIES

AXES = ("data", "fsdp", "tensor", "context")


def set_cpu_devices(config: ConfigDict) -> None:
    """Splits the host into `config.mesh.cpu_devices` JAX devices. Call before JAX touches a backend.

    XLA:CPU runs elementwise work on one thread per device, so that one device per core uses all cores.
    """
    jax.config.update("jax_num_cpu_devices", config.mesh.cpu_devices)


def make_mesh(strategy: str, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices, along the axis that the strategy's batch rows are split over."""
    devices = jax.devices() if devices is None else devices
    axis = "fsdp" if "fsdp" in STRATEGIES[strategy].values() else "data"
    shape = [len(devices) if name == axis else 1 for name in AXES]
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows split over the data axes; `leading` axes before the row axis stay whole."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, BATCH_AXES))


def partition_spec(axes: tuple[str | None, ...], table: Mapping[str, str | None]) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes.

    Raises:
        ValueError: two dimensions of one array would use the same mesh axis.
    """
    mesh_axes = [table[axis] if axis else None for axis in axes]
    used = [axis for axis in mesh_axes if axis]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} map to {mesh_axes}: a mesh axis can split only one dimension of an array")
    return PartitionSpec(*mesh_axes)


def param_shardings(model_config: Qwen2Config, mesh: Mesh, strategy: str) -> dict[str, NamedSharding]:
    """Sharding of every parameter, by name.

    Raises:
        ValueError: a dimension does not divide by the devices that it is split over.
    """
    shardings = {}
    for name, declaration in declarations(model_config).items():
        spec = partition_spec(declaration.axes, STRATEGIES[strategy])
        for size, axis in zip(declaration.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"mesh.strategy = {strategy!r} splits {name} {declaration.shape} over {mesh.shape[axis]} devices along"
                    f" a dimension of {size}; use a device count that divides it, or another strategy"
                )
        shardings[name] = NamedSharding(mesh, spec)
    return shardings


def like_params(tree: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Shardings for an optimizer state: subtrees shaped like the parameters follow them, everything else is replicated."""

    def follows(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == params.keys()

    return jax.tree.map(lambda node: shardings if follows(node) else replicated(mesh), tree, is_leaf=follows)
