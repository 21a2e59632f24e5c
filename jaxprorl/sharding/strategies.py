"""Sharding is a table: logical axis of a parameter -> mesh axis. A new strategy is a new table (docs/sharding.md)."""

from collections.abc import Mapping
from dataclasses import dataclass

Table = Mapping[str, str | None]

AXES = ("data", "fsdp", "tensor", "context")  # of the mesh
BATCH_AXES = ("data", "fsdp")  # rows of a batch are split over both
CONTEXT_AXIS = "context"  # the tokens of a row are split over it

WHOLE: Table = {"layers": None, "vocab": None, "embed": None, "heads": None, "kv_heads": None, "mlp": None}
FSDP: Table = {**WHOLE, "embed": "fsdp"}
TENSOR: Table = {**WHOLE, "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
FSDP_TENSOR: Table = {**TENSOR, "embed": "fsdp"}


@dataclass(frozen=True)
class Strategy:
    """One way to lay a training state out. Every table names all logical axes; None = every device holds the whole axis.

    Attributes:
        params: of policy and reference.
        moments: of the optimizer's state, and what gradients are reduced to.
        fills: the mesh axis that takes the devices which the config leaves open.
        needs: mesh axes that must be given a size of 2 or more.
    """

    params: Table
    moments: Table
    fills: str
    needs: tuple[str, ...] = ()


STRATEGIES: dict[str, Strategy] = {
    "dp": Strategy(WHOLE, WHOLE, "data"),
    "fsdp": Strategy(FSDP, FSDP, "fsdp"),  # ZeRO-3; mesh.data > 1 makes copies of it, e.g. one per host
    "zero1": Strategy(WHOLE, FSDP, "fsdp"),
    "tp": Strategy(TENSOR, TENSOR, "tensor"),
    "fsdp_tp": Strategy(FSDP_TENSOR, FSDP_TENSOR, "fsdp", ("tensor",)),
    "fsdp_cp": Strategy(FSDP, FSDP, "fsdp", ("context",)),
}


def mesh_sizes(strategy: str, sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Devices along each mesh axis: `sizes` where they are not 0, the rest along the axis that the strategy fills, 1 elsewhere.

    Raises:
        ValueError: the sizes do not make up the devices, or give the strategy an axis it does not use or deny it one that it needs; the
            message begins with the axis, or with "strategy" where that itself cannot be.
    """
    plan = STRATEGIES[strategy]
    if plan.fills not in AXES:
        raise ValueError(f"strategy = {strategy!r} fills {plan.fills!r}, no mesh axis; use one of {AXES}")
    used = {*BATCH_AXES, plan.fills, *plan.needs, *plan.params.values(), *plan.moments.values()}
    given = {axis: size for axis, size in sizes.items() if size}
    for axis, size in given.items():
        if size > 1 and axis not in used:
            raise ValueError(f"{axis} = {size}: strategy {strategy!r} splits nothing over it; use 0 or 1, or another strategy")
    for axis in plan.needs:
        if given.get(axis, 1) < 2:
            raise ValueError(f"{axis} = {sizes.get(axis, 0)}: strategy {strategy!r} needs 2 or more devices along it")
    taken = 1
    for size in given.values():
        taken *= size
    if devices % taken or (plan.fills in given and taken != devices):
        raise ValueError(
            f"{plan.fills} = {sizes.get(plan.fills, 0)}: the sizes {given} take {taken} devices, there are {devices}; "
            f"leave {plan.fills} at 0 and let the others divide {devices}"
        )
    return {axis: given.get(axis, 1) for axis in AXES} | ({} if plan.fills in given else {plan.fills: devices // taken})
