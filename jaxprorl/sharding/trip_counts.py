"""How often an HLO loop turns. CPU and GPU print it; for TPU the loop's counter is followed from its first value to its last."""

import operator
import re
from collections.abc import Callable

from jaxprorl.sharding.hlo import Computation, Instruction, Module

# (number of a parameter, element of its tuple or None for a scalar) -> its value; None = not known.
Arguments = Callable[[int, int | None], int | None]

MAX_TURNS = 10_000  # a counter is not followed further
SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert")  # as their operand, for integers
BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne}


def nothing_known(parameter: int, element: int | None) -> int | None:
    """Arguments of the entry computation."""
    return None


def trip_count(module: Module, inside: Computation, loop: Instruction, arguments: Arguments) -> int | None:
    """Turns of a `while` of computation `inside`; None if they depend on data (or are more than MAX_TURNS)."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.details)
    if known:
        return int(known[1])
    (condition,), (body,) = (_computations(module, loop, name) for name in ("condition", "body"))
    turns: list[dict[int, int | None]] = [{}]

    def element_at(turn: int, element: int) -> int | None:
        if element not in turns[turn]:
            if turn == 0:
                value = scalar(module, inside, loop.operands[0], arguments, element)
            else:
                value = scalar(module, body, body.root, lambda _, e: None if e is None else element_at(turn - 1, e), element)
            turns[turn][element] = value
        return turns[turn][element]

    for turn in range(MAX_TURNS + 1):
        goes_on = scalar(module, condition, condition.root, lambda _, e, t=turn: None if e is None else element_at(t, e))  # type: ignore[misc]
        if not goes_on:
            return None if goes_on is None else turn
        turns.append({})
    return None


def body_arguments(module: Module, inside: Computation, loop: Instruction, arguments: Arguments) -> Arguments:
    """What is known in every turn of a loop: the first values of what no turn changes."""
    (body,) = _computations(module, loop, "body")

    def argument(_: int, element: int | None) -> int | None:
        if element is None or not _unchanged(body, element):
            return None
        return scalar(module, inside, loop.operands[0], arguments, element)

    return argument


def callee_arguments(module: Module, inside: Computation, names: list[str], arguments: Arguments) -> Arguments:
    """What is known in a computation that is called with these operands."""
    return lambda number, element: scalar(module, inside, names[number], arguments, element) if number < len(names) else None


def scalar(module: Module, inside: Computation, name: str, arguments: Arguments, element: int | None = None) -> int | None:
    """Value of an integer or truth value, or of an element of a tuple of them, if it follows from constants and `arguments`."""
    instruction = inside.instructions.get(name)
    if instruction is None:
        return None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "parameter":
        return arguments(int(instruction.argument), element)
    if opcode in SAME:
        return scalar(module, inside, operands[0], arguments, element)
    if opcode in ("fusion", "call"):
        (callee,) = _computations(module, instruction, "calls", "to_apply")
        return scalar(module, callee, callee.root, callee_arguments(module, inside, operands, arguments), element)
    if opcode == "while" and element is not None:
        return body_arguments(module, inside, instruction, arguments)(0, element)
    if opcode == "tuple" and element is not None:
        return scalar(module, inside, operands[element], arguments)
    if element is not None:
        return None
    if opcode == "constant":
        return _constant(instruction.argument)
    if opcode == "get-tuple-element":
        return scalar(module, inside, operands[0], arguments, _index(instruction))
    if opcode == "compare" or opcode in BINARY:
        left, right = (scalar(module, inside, operand, arguments) for operand in operands)
        direction = re.search(r"direction=(\w+)", instruction.attributes)
        operation = COMPARE[direction[1]] if direction else BINARY[opcode]
        return None if left is None or right is None else int(operation(left, right))
    return None


def _unchanged(body: Computation, element: int) -> bool:
    """Whether a loop's body hands this element of its tuple on as it is."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    instruction = body.instructions[root.operands[element]]
    while instruction.opcode in SAME and instruction.operands:
        instruction = body.instructions[instruction.operands[0]]
    if instruction.opcode != "get-tuple-element" or _index(instruction) != element:
        return False
    return body.instructions[instruction.operands[0]].opcode == "parameter"


def _computations(module: Module, instruction: Instruction, *attributes: str) -> list[Computation]:
    return [module.computations[name] for name in instruction.called(*attributes)]


def _index(instruction: Instruction) -> int:
    return int(instruction.attributes.removeprefix("index="))


def _constant(text: str) -> int | None:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": 1, "false": 0}.get(text)
