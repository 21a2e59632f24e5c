"""The text of optimised HLO (CPU, GPU, TPU) as data: computations, instructions, sizes and device groups. Nothing here touches JAX."""

import dataclasses
import math
import re

import numpy as np

from jaxprorl.errors import UserError

Groups = tuple[tuple[int, ...], ...]

COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
WIDTH_BITS = {"pred": 8, "token": 0, "opaque": 0, "f8": 8, "f4": 4}  # of types that do not carry it at their end


class HloError(UserError, ValueError):
    """HLO that cannot be read, or whose meaning is not certain."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
        shape: type and layout of the result, as printed.
        argument: what stands in the parentheses: operands, the number of a parameter, or a constant.
        attributes: what follows, up to the metadata: `dimensions={0}`, `calls=%name`, ...
        details: the rest: frontend attributes, metadata, backend config.
    """

    name: str
    opcode: str
    shape: str
    argument: str
    attributes: str
    details: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.argument)

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from; empty if XLA lost that."""
        found = re.search(r'op_name="([^"]*)"', self.details)
        return found[1] if found else ""

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations that these attributes point to, e.g. `calls`."""
        found = re.findall(rf"(?:^|, )(?:{'|'.join(attributes)})=(%[\w.\-]+|\{{[^}}]*\}})", self.attributes)
        return re.findall(r"%([\w.\-]+)", " ".join(found))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A body of instructions, by name and in order; `root` names the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclasses.dataclass(frozen=True)
class Module:
    """All computations; `entry` names the one that runs, on `devices` devices."""

    computations: dict[str, Computation]
    entry: str
    devices: int


def parse_module(hlo_text: str) -> Module:
    """Reads what `compiled.as_text()` returns.

    Raises:
        HloError: no entry computation, or a line that is no instruction.
    """
    computations: dict[str, Computation] = {}
    entry = root = name = ""
    instructions: dict[str, Instruction] = {}
    for line in hlo_text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if header := COMPUTATION.match(line):
            name, instructions, root = header[2], {}, ""
            entry = name if header[1] else entry
        elif name and line.startswith("}"):
            computations[name] = Computation(name, instructions, root)
            name = ""
        elif name and line.strip():
            if not (found := INSTRUCTION.match(line)):
                raise HloError(f"in computation {name}: not an instruction: {line.strip()[:120]!r}")
            instructions[found[2]] = _instruction(found[2], found[3])
            root = found[2] if found[1] or not root else root
    if entry not in computations:
        raise HloError("no complete ENTRY computation: not the text of a compiled module")
    counts = (re.search(rf"^HloModule .*\b{count}=(\d+)", hlo_text, re.MULTILINE) for count in ("replica_count", "num_partitions"))
    return Module(computations, entry, math.prod(int(count[1]) for count in counts if count))


def _instruction(name: str, text: str) -> Instruction:
    shape, rest = _split(text, 0 if text.startswith("(") else text.find(" "))
    opcode, _, rest = rest.strip().partition("(")
    argument, rest = _split("(" + rest, 0)
    cut = re.search(r", (?:frontend_attributes|metadata|backend_config)=", rest)
    attributes, details = (rest[: cut.start()], rest[cut.start() :]) if cut else (rest, "")
    return Instruction(name, opcode, shape, argument[1:-1], attributes.removeprefix(", "), details)


def _split(text: str, start: int) -> tuple[str, str]:
    """Cuts behind the parenthesis that opens at `start`, or before `start` if none opens there."""
    if not text.startswith("(", start):
        return text[:start], text[start:]
    depth = 0
    for end, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return text[: end + 1], text[end + 1 :]
    raise HloError(f"a parenthesis stays open: {text[:120]!r}")


def shape_bytes(shape: str) -> int:
    """Size of an array, or of all arrays of a tuple, without padding; arrays of less than a byte per element are packed.

    Raises:
        HloError: an element type of unknown width.
    """
    return sum(
        -(-_width_bits(dtype) * math.prod(int(d.strip("<=")) for d in sizes.split(",") if d) // 8) for dtype, sizes in _arrays(shape)
    )


def _arrays(shape: str) -> list[tuple[str, str]]:
    return ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape))


def _width_bits(dtype: str) -> int:
    """Most types end in their width: f32, bf16, s4; f8e4m3fn and f4e2m1fn begin with it."""
    for start, bits in WIDTH_BITS.items():
        if dtype.startswith(start):
            return bits
    if found := re.fullmatch(r"(?:s|u|f|bf|c)(\d+)", dtype):
        return int(found[1])
    raise HloError(f"element type {dtype!r}: its width is not known")


def device_groups(attributes: str, devices: int) -> Groups:
    """The groups that take part in a collective, from `replica_groups=` in any of its forms; none given = all devices together.

    `{{0,1},{2,3}}` lists them. `[4,2]<=[2,4]T(1,0)`: devices counted in the right shape, transposed, cut into 4 groups of 2.
    `mesh['a'=2,'b'=4] {'b'}`: devices counted in a mesh; those that differ along the named axes form a group; `'b':(2)2` is
    the part of size 2 of axis b that lies inside its first part of size 2.

    Raises:
        HloError: another form, or groups that do not hold every device once. Lists may leave devices out.
    """
    _, found, text = attributes.partition("replica_groups=")
    if not found or text.startswith("{}"):
        return (tuple(range(devices)),)
    if listed := re.match(r"\{(\{[\d,{}]*\})\}", text):
        groups = tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1]))
        named = [device for group in groups for device in group]
        if len(named) != len(set(named)) or max(named, default=0) >= devices:
            raise HloError(f"replica groups {listed[0]!r} name a device twice, or one beyond the {devices}")
        return groups
    if counted := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, cut, order = _numbers(counted[2]), _numbers(counted[1]), _numbers(counted[3] or "")
        if not (math.prod(shape) == math.prod(cut) == devices and sorted(order) in ([], list(range(len(shape)))) and len(cut) == 2):
            raise HloError(f"replica groups {counted[0]!r} do not hold each of {devices} devices once")
        return _groups(np.arange(devices).reshape(shape).transpose(order or None).reshape(cut))
    if mesh := re.match(r"mesh\[((?:'[^']*'=\d+,?)*)\] \{((?:'[^']*'(?::\(\d+\)\d+)?,?)*)\}", text):
        return _mesh_groups(mesh[0], mesh[1], mesh[2], devices)
    raise HloError(f"replica groups of an unknown form: {text[:120]!r}")


def _mesh_groups(text: str, mesh: str, axes: str, devices: int) -> Groups:
    parts: dict[str, list[int]] = {name: [int(size)] for name, size in re.findall(r"('[^']*')=(\d+)", mesh)}
    if math.prod(size for part in parts.values() for size in part) != devices:
        raise HloError(f"replica groups {text!r} do not hold each of {devices} devices once")
    chosen: set[tuple[str, int]] = set()
    for name, before, size in re.findall(r"('[^']*')(?::\((\d+)\)(\d+))?", axes):
        if name not in parts or name in {known for known, _ in chosen}:
            raise HloError(f"replica groups {text!r}: {name} is no axis of the mesh, or is named twice")
        if before:
            (whole,), inner = parts[name], int(before) * int(size)
            if inner == 0 or whole % inner:
                raise HloError(f"replica groups {text!r}: {name} of size {whole} has no such part")
            parts[name] = [int(before), int(size), whole // inner]
        chosen.add((name, 1 if before else 0))
    dimensions = [(name, part) for name, sizes in parts.items() for part in range(len(sizes))]
    inside = [i for i, dimension in enumerate(dimensions) if dimension in chosen]
    sizes = [size for part in parts.values() for size in part]
    ids = np.arange(devices).reshape(sizes).transpose([i for i in range(len(sizes)) if i not in inside] + inside)
    return _groups(ids.reshape(-1, math.prod(sizes[i] for i in inside)))


def permute_groups(attributes: str) -> Groups:
    """Devices that a collective-permute ties together, from `source_target_pairs=`: each ring or chain is one group."""
    group_of: dict[int, set[int]] = {}
    found = re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes)
    for source, target in map(_numbers, re.findall(r"\{([\d,]*)\}", found[1] if found else "")):
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of |= dict.fromkeys(joined, joined)
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def _groups(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
