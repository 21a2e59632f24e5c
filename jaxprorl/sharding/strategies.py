"""Sharding is a table: logical axis of a parameter -> mesh axis. A new strategy is a new table."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

# Every table names all logical axes; None = replicated.
STRATEGIES: dict[str, dict[str, str | None]] = {
    "dp": {"layers": None, "vocab": None, "embed": None, "heads": None, "kv_heads": None, "mlp": None},
    "fsdp": {"layers": None, "vocab": None, "embed": "fsdp", "heads": None, "kv_heads": None, "mlp": None},
}
BATCH_AXES = ("data", "fsdp")  # rows of a batch are split over both


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
