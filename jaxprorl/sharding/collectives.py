"""What a compiled program sends between devices, read from its optimised HLO: which collectives, how often, how many bytes.

Bytes on the wire are those that one device sends, by the cost of a ring: n devices all-reduce an array in 2 (n - 1) / n of its size,
all-gather, reduce-scatter and exchange (all-to-all) it in (n - 1) / n, and pass it on (permute, broadcast) in 1.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

from jaxprorl.sharding.hlo import (
    Computation,
    Groups,
    HloError,
    Instruction,
    Module,
    device_groups,
    parse_module,
    permute_groups,
    shape_bytes,
)
from jaxprorl.sharding.trip_counts import Arguments, body_arguments, callee_arguments, nothing_known, trip_count

# Bytes that one of n devices sends, as a share of the whole array.
RING_COST: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: float(n > 1),
    "collective-broadcast": lambda n: float(n > 1),
}
REFUSED = ("ragged-all-to-all", "send", "recv")  # their bytes do not follow from their shapes, or their peers are not printed
CALLS = ("calls", "to_apply", "called_computations")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around a collective: its origin and how often it turns. `known` is False where the caller said so, not the HLO."""

    op_name: str
    trips: int
    known: bool = True


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: a key of RING_COST, with or without -start in the HLO.
        groups: device numbers that work together.
        bytes: the whole array, once: what an all-gather ends with, a reduce-scatter begins with, all arrays of a joint all-reduce.
        shapes: the operands' types as printed, without layout.
        op_name: where it comes from in the traced program; that of the nearest caller or loop if XLA lost its own.
        computation: HLO computation that it stands in.
        loops: around it, outermost first.
    """

    name: str
    kind: str
    groups: Groups
    bytes: int
    shapes: str
    op_name: str
    computation: str
    loops: tuple[Loop, ...]

    @property
    def group_size(self) -> int:
        """Devices of the largest group."""
        return max(len(group) for group in self.groups)

    @property
    def executions(self) -> int:
        """How often it runs when the program runs once."""
        return math.prod(loop.trips for loop in self.loops)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends each time."""
        return self.bytes * RING_COST[self.kind](self.group_size)

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that a device sends when the program runs once."""
        return self.executions * self.wire_bytes


@dataclasses.dataclass(frozen=True)
class Total:
    """Collectives taken together; `op_name` is empty where they come from several places. `bytes` and `wire_bytes` of all executions."""

    kind: str
    group_size: int
    op_name: str
    executions: int
    bytes: int
    wire_bytes: float


def read_collectives(hlo_text: str, unknown_trips: int | None = None) -> tuple[Collective, ...]:
    """All collectives that a program runs, in the order of the text.

    A start and its done are one. Of a conditional's branches the one that sends most counts: an upper bound. TPU prints a reduce-scatter as
    a fusion `all-reduce-scatter` of an all-reduce and a slice; it counts as a reduce-scatter. What custom calls send is not seen.

    Args:
        hlo_text: optimised HLO, `jax.jit(f).lower(...).compile().as_text()`.
        unknown_trips: turns of loops around collectives whose number depends on data, e.g. 1 for the bytes per turn.

    Raises:
        HloError: text that cannot be read with certainty; a loop of unknown turns around collectives while `unknown_trips` is None.
    """
    module = parse_module(hlo_text)
    return tuple(_walk(module, module.computations[module.entry], nothing_known, (), "", unknown_trips))


def wire_bytes(hlo_text: str, unknown_trips: int | None = None) -> float:
    """Bytes that each device sends when a program runs once; arguments and errors of `read_collectives`."""
    return sum(collective.total_wire_bytes for collective in read_collectives(hlo_text, unknown_trips))


def totals(collectives: Iterable[Collective]) -> list[Total]:
    """By kind and group size, most bytes on the wire first."""
    return _grouped(collectives, lambda c: (c.kind, c.group_size, ""))


def largest(collectives: Iterable[Collective], count: int = 5) -> list[Total]:
    """By kind, group size and origin, the `count` with the most bytes on the wire."""
    return _grouped(collectives, lambda c: (c.kind, c.group_size, c.op_name))[:count]


def _grouped(collectives: Iterable[Collective], key: Callable[[Collective], tuple[str, int, str]]) -> list[Total]:
    members: dict[tuple[str, int, str], list[Collective]] = {}
    for collective in collectives:
        members.setdefault(key(collective), []).append(collective)
    result = [
        Total(*name, sum(c.executions for c in some), sum(c.executions * c.bytes for c in some), sum(c.total_wire_bytes for c in some))
        for name, some in members.items()
    ]
    return sorted(result, key=lambda total: -total.wire_bytes)


def _walk(
    module: Module, inside: Computation, arguments: Arguments, loops: tuple[Loop, ...], origin: str, unknown_trips: int | None
) -> list[Collective]:
    """The collectives of a computation and of all that it calls."""

    def enter(name: str, arguments: Arguments, loops: tuple[Loop, ...] = loops) -> list[Collective]:
        return _walk(module, module.computations[name], arguments, loops, op_name, unknown_trips)

    found: list[Collective] = []
    for instruction in inside.instructions.values():
        opcode, op_name = instruction.opcode, instruction.op_name or origin
        kind = opcode.removesuffix("-start")
        if kind in REFUSED and "is_host_transfer=true" not in instruction.attributes:
            raise HloError(f"{instruction.name} in {inside.name}: the bytes of {kind!r} on the wire are not known")
        if kind in RING_COST:
            if not _repeated(instruction, inside):
                scatters = inside.name.startswith("all-reduce-scatter")
                found.append(_collective(module, inside, instruction, "reduce-scatter" if scatters else kind, loops, op_name))
        elif opcode == "while":
            trips = trip_count(module, inside, instruction, arguments)
            loop = Loop(op_name, trips if trips is not None else unknown_trips or 0, trips is not None)
            (condition,), (body,) = instruction.called("condition"), instruction.called("body")
            known = body_arguments(module, inside, instruction, arguments)
            more = enter(condition, known, (*loops, dataclasses.replace(loop, trips=loop.trips + 1)))
            more += enter(body, known, (*loops, loop))
            if more and trips is None and unknown_trips is None:
                raise HloError(
                    f"loop {instruction.name} ({op_name}) holds {len(more)} collectives, {more[0].name} first, and turns as often as data"
                    " say; unknown_trips = 1 gives the bytes per turn"
                )
            found += more
        elif opcode == "conditional":
            names = instruction.called("true_computation", "false_computation", "branch_computations")
            known_in = [callee_arguments(module, inside, [operand], arguments) for operand in instruction.operands[1:]]
            branches = [enter(name, known) for name, known in zip(names, known_in, strict=True)]
            found += max(branches, key=lambda branch: sum(c.total_wire_bytes for c in branch))
        elif not opcode.endswith(("-update", "-done")):  # of an async-start, which calls the same computation
            for name in instruction.called(*CALLS):
                found += enter(name, callee_arguments(module, inside, instruction.operands, arguments))
    return found


def _collective(
    module: Module, inside: Computation, instruction: Instruction, kind: str, loops: tuple[Loop, ...], op_name: str
) -> Collective:
    # By the operands, as results differ: a start's holds the operands too, and on some platforms counters.
    missing = [name for name in instruction.operands if name not in inside.instructions]
    if missing or not instruction.operands:
        raise HloError(f"{instruction.name} in {inside.name}: its operands {missing} are not in the text")
    shapes = [inside.instructions[name].shape for name in instruction.operands]
    permutes = kind == "collective-permute"
    groups = permute_groups(instruction.attributes) if permutes else device_groups(instruction.attributes, module.devices)
    share = max(len(group) for group in groups) if kind == "all-gather" else 1
    printed = ", ".join(shape.split("{")[0] for shape in shapes)
    return Collective(instruction.name, kind, groups, share * sum(map(shape_bytes, shapes)), printed, op_name, inside.name, loops)


def _repeated(instruction: Instruction, inside: Computation) -> bool:
    """Whether this is a later mention of a collective: TPU prints one that runs beside several fusions in each of them (a chain)."""
    users = [other for other in inside.instructions.values() if instruction.name in other.operands]
    begins = any('custom_call_target="AsyncCollectiveStart"' in other.attributes for other in users)
    return "chain_id=" in instruction.details and not begins
