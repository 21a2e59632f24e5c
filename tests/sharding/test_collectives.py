import math

import pytest
from accelerators import optimised_hlo
from record_hlo import PROGRAMS, recorded

from jaxprorl.sharding.collectives import RING_COST, Collective, Total, largest, read_collectives, totals, wire_bytes
from jaxprorl.sharding.hlo import HloError

# Of tests/sharding/programs.py, `kinds`: rows f32[8, 128] on each device = 4096 bytes, weights f32[128, 128] = 65536 when gathered.
KINDS = {
    ("all-gather", 4): (3 * 5, 65536, 65536 * 3 / 4),
    ("all-reduce", 2): (3, 4096, 4096 * 2 * 1 / 2),
    ("all-reduce", 8): (1, 512, 512 * 2 * 7 / 8),  # in a branch
    ("collective-permute", 4): (6, 4096, 4096),
    ("all-to-all", 4): (1, 4096, 4096 * 3 / 4),
    ("reduce-scatter", 4): (1, 4096, 4096 * 3 / 4),
}
# `layers`: f32[256, 512] and f32[512, 256], both 524288 bytes; 2 micro-batches x 5 layers; gathered forward and again backward.
MATRIX = 256 * 512 * 4


def summary(collectives: tuple[Collective, ...]) -> dict[tuple[str, int], tuple[int, int, float]]:
    """Executions, bytes and wire bytes of one execution by kind and group size."""
    return {(t.kind, t.group_size): (t.executions, t.bytes // t.executions, t.wire_bytes / t.executions) for t in totals(collectives)}


RECORDED = ("cpu", "h100", "v5e")


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_kinds_as_recorded(target: str) -> None:
    assert summary(read_collectives(recorded(target, "kinds"))) == KINDS


def test_kinds_as_recorded_for_tpu() -> None:
    """Weights travel in bfloat16, and of so small an array TPU makes a whole sum, then each device slices it."""
    expected = KINDS | {("all-gather", 4): (15, 32768, 32768 * 3 / 4), ("all-reduce", 4): (1, 4096, 4096 * 2 * 3 / 4)}
    del expected["reduce-scatter", 4]
    assert summary(read_collectives(recorded("v5e", "kinds"))) == expected


@pytest.mark.parametrize("target", RECORDED)
def test_groups_loops_and_origins_as_recorded(target: str) -> None:
    found = {(c.kind, c.group_size): c for c in read_collectives(recorded(target, "kinds"))}
    assert found["all-gather", 4].groups == found["collective-permute", 4].groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["all-reduce", 2].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["all-reduce", 8].groups == (tuple(range(8)),)
    loops = {key: [loop.trips for loop in c.loops] for key, c in found.items() if c.loops}
    assert loops == {("all-gather", 4): [3, 5], ("all-reduce", 2): [3], ("collective-permute", 4): [6]}
    assert all(loop.known for c in found.values() for loop in c.loops)
    assert found["all-gather", 4].op_name == "jit(program)/shard_map/while/body/eval_jaxpr/while/body/eval_jaxpr/all_gather"
    assert found["all-reduce", 8].op_name == "jit(program)/shard_map/cond/branch_1_fun/psum"


def test_layers_as_recorded() -> None:
    gathers, scatters = 2 * 5 * 2 * 2 * MATRIX, 2 * 5 * 2 * MATRIX  # micro-batches x layers x matrices x passes
    by_target = {
        target: {t.kind: (t.bytes, t.wire_bytes) for t in totals(read_collectives(recorded(target, "layers")))} for target in RECORDED
    }
    # CPU knows no reduce-scatter of its own.
    assert by_target["cpu"] == {"all-gather": (gathers, gathers * 7 / 8), "all-reduce": (scatters, scatters * 2 * 7 / 8)}
    assert by_target["h100"] == {"all-gather": (gathers, gathers * 7 / 8), "reduce-scatter": (scatters, scatters * 7 / 8)}
    # TPU gathers in bfloat16; one gather runs beside several fusions and is printed in four of them.
    assert by_target["v5e"] == {"all-gather": (gathers / 2, gathers / 2 * 7 / 8), "reduce-scatter": (scatters, scatters * 7 / 8)}
    assert recorded("v5e", "layers").count(" all-gather(") == 7


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("target", RECORDED)
def test_todays_compiler_says_what_is_recorded(target: str, program: str) -> None:
    now, then = (summary(read_collectives(text)) for text in (optimised_hlo(target, f"programs:{program}"), recorded(target, program)))
    assert now == then


def test_the_training_step_gathers_layer_by_layer_and_nothing_per_chunk_of_the_loss() -> None:
    text = recorded("h100", "training_fsdp")
    with pytest.raises(HloError, match=r"turns as often as data say"):  # micro-batches are counted on the way
        read_collectives(text)
    found = read_collectives(text, unknown_trips=1)
    assert {tuple((loop.trips, loop.known) for loop in c.loops) for c in found} == {(), ((1, False),), ((1, False), (28, True))}
    assert {c.group_size for c in found} == {8}
    assert wire_bytes(text, unknown_trips=1) == sum(total.wire_bytes for total in totals(found))


MODULE = """
HloModule m, num_partitions=4
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}
{computations}
ENTRY %main (x: f32[6,4], y: bf16[8], n: s32[]) -> f32[6,4] {{
  %x = f32[6,4]{{1,0}} parameter(0)
  %y = bf16[8]{{0}} parameter(1)
  %n = s32[] parameter(2)
  %zero = s32[] constant(0)
  %t = (s32[], s32[], f32[6,4]) tuple(%zero, %n, %x)
{lines}
  ROOT %r = f32[6,4]{{1,0}} copy(%x)
}}
"""


def read(*lines: str, computations: str = "", unknown_trips: int | None = None) -> tuple[Collective, ...]:
    return read_collectives(MODULE.format(lines="\n".join(f"  {line}" for line in lines), computations=computations), unknown_trips)


@pytest.mark.parametrize(
    ("line", "kind", "groups", "size", "wire"),
    [
        ("f32[24,4] all-gather(%x), replica_groups={}, dimensions={0}", "all-gather", 4, 384, 288),
        ("(f32[6,4], f32[24,4]) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}", "all-gather", 4, 384, 288),
        ("((f32[6,4], bf16[8]), (f32[12,4], bf16[16])) all-gather-start(%x, %y), replica_groups=[2,2]<=[4]", "all-gather", 2, 224, 112),
        ("f32[6,4] all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum", "all-reduce", 2, 96, 96),
        ("(f32[6,4], bf16[8]) all-reduce(%x, %y), replica_groups={}, to_apply=%sum", "all-reduce", 4, 112, 168),
        ("(f32[6,4], bf16[8]) all-reduce-start(%x, %y), replica_groups={}, to_apply=%sum", "all-reduce", 4, 112, 168),
        ("((f32[6,4]), f32[6,4]) all-reduce-start(%x), replica_groups={{0,1,2},{3}}, to_apply=%sum", "all-reduce", 3, 96, 128),
        ("f32[6,1] reduce-scatter(%x), dimensions={1}, to_apply=%sum", "reduce-scatter", 4, 96, 72),
        ("((f32[6,4]), f32[6,1]) reduce-scatter-start(%x), dimensions={1}, to_apply=%sum", "reduce-scatter", 4, 96, 72),
        ("bf16[8] all-to-all(%y), dimensions={0}", "all-to-all", 4, 16, 12),
        ("(bf16[8], bf16[8]) all-to-all(%y, %y), replica_groups={{0,1},{2,3}}", "all-to-all", 2, 32, 16),
        (
            "(bf16[8], bf16[8], u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,2}}",
            "collective-permute",
            3,
            16,
            16,
        ),
        ("bf16[8] collective-permute(%y), source_target_pairs={{0,0},{1,1}}", "collective-permute", 1, 16, 0),
        ("bf16[8] collective-broadcast(%y), replica_groups={{0,1},{2,3}}", "collective-broadcast", 2, 16, 16),
        ("bf16[8] all-gather(%y), replica_groups=mesh['a'=4] {}", "all-gather", 1, 16, 0),
    ],
)
def test_one_collective_of_every_kind_and_print(line: str, kind: str, groups: int, size: int, wire: float) -> None:
    (found,) = read(f"%c = {line}", *([f"%done = f32[6,4] {kind}-done(%c)"] if "-start(" in line else []))
    assert (found.kind, found.group_size, found.bytes, found.executions) == (kind, groups, size, 1)
    assert found.wire_bytes == found.total_wire_bytes == pytest.approx(wire, rel=1e-12)


def test_ring_costs() -> None:
    assert {kind: cost(1) for kind, cost in RING_COST.items()} == dict.fromkeys(RING_COST, 0)
    assert RING_COST["all-reduce"](8) == RING_COST["all-gather"](8) + RING_COST["reduce-scatter"](8) == 1.75


INNER = """
%wrapped (p: f32[6,4]) -> f32[6,1] {
  %p = f32[6,4]{1,0} parameter(0)
  ROOT %rs = f32[6,1] reduce-scatter(%p), dimensions={1}, to_apply=%sum
}
%all-reduce-scatter.3 (p: f32[6,4]) -> f32[6,1] {
  %p = f32[6,4]{1,0} parameter(0)
  %all = f32[6,4] all-reduce(%p), to_apply=%sum
  ROOT %slice = f32[6,1] dynamic-slice(%all)
}
%small (p: f32[6,4]) -> f32[6,4] {
  %p = f32[6,4]{1,0} parameter(0)
  ROOT %a = f32[6,4] all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%sum, metadata={op_name="small"}
}
%large (p: f32[6,4]) -> f32[6,4] {
  %p = f32[6,4]{1,0} parameter(0)
  %a = f32[6,4] all-reduce(%p), to_apply=%sum
  ROOT %b = f32[6,4] all-reduce(%a), to_apply=%sum
}
%none (p: f32[6,4]) -> f32[6,4] {
  ROOT %p = f32[6,4]{1,0} parameter(0)
}
"""
ORIGIN = 'metadata={op_name="outer"}'


def test_an_async_wrapper_counts_once_and_lends_its_origin() -> None:
    (found,) = read(
        f"%s = ((f32[6,4]), f32[6,1], s32[]) async-start(%x), calls=%wrapped, {ORIGIN}",
        "%u = ((f32[6,4]), f32[6,1], s32[]) async-update(%s), calls=%wrapped",
        "%d = f32[6,1] async-done(%u), calls=%wrapped",
        computations=INNER,
    )
    assert (found.kind, found.bytes, found.op_name, found.computation) == ("reduce-scatter", 96, "outer", "wrapped")


def test_calls_and_fusions_are_followed() -> None:
    found = read(
        f"%a = f32[6,4] call(%x), to_apply=%small, {ORIGIN}",
        f"%b = f32[6,1] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3, {ORIGIN}",
        "%c = f32[6,4] custom-call(%x), custom_call_target=any, called_computations={%large}",
        computations=INNER,
    )
    assert [(c.kind, c.op_name, c.group_size) for c in found] == [
        ("all-reduce", "small", 2),
        ("reduce-scatter", "outer", 4),
        ("all-reduce", "", 4),
        ("all-reduce", "", 4),
    ]


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%small, %none, %large}",
        "branch_computations={%large, %small, %none}",
        "true_computation=%large, false_computation=%small",
    ],
)
def test_of_a_conditional_the_branch_that_sends_most_counts(branches: str) -> None:
    operands = ", ".join(["%n"] + ["%x"] * branches.count("%"))
    found = read(f"%c = f32[6,4] conditional({operands}), {branches}", computations=INNER)
    assert [c.computation for c in found] == ["large", "large"]


LOOPS = """
%inner (q: (s32[], s32[], f32[6,4])) -> (s32[], s32[], f32[6,4]) {
  %q = (s32[], s32[], f32[6,4]) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %n = s32[] get-tuple-element(%q), index=1
  %x = f32[6,4] get-tuple-element(%q), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[6,4] all-reduce(%x), to_apply=%sum, metadata={op_name="loop/psum"}
  ROOT %t = (s32[], s32[], f32[6,4]) tuple(%next, %n, %y)
}
%turns (p: (s32[], s32[], f32[6,4])) -> pred[] {
  %p = (s32[], s32[], f32[6,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
%outer (q: (s32[], s32[], f32[6,4])) -> (s32[], s32[], f32[6,4]) {
  %q = (s32[], s32[], f32[6,4]) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %n = s32[] get-tuple-element(%q), index=1
  %x = f32[6,4] get-tuple-element(%q), index=2
  %two = s32[] constant(2)
  %u = (s32[], s32[], f32[6,4]) tuple(%two, %n, %x)
  %w = (s32[], s32[], f32[6,4]) while(%u), condition=%turns, body=%inner, metadata={op_name="inner"}
  %y = f32[6,4] get-tuple-element(%w), index=2
  %next = s32[] add(%i, %two)
  ROOT %t = (s32[], s32[], f32[6,4]) tuple(%next, %n, %y)
}
"""
WHILE = 'while({0}), condition=%turns, body={1}, metadata={{op_name="outer"}}'


def test_nested_loops_multiply_and_know_what_no_turn_changes() -> None:
    lines = ("%seven = s32[] constant(7)", "%s = (s32[], s32[], f32[6,4]) tuple(%zero, %seven, %x)")
    (found,) = read(*lines, f"%w = (s32[], s32[], f32[6,4]) {WHILE.format('%s', '%outer')}", computations=LOOPS)
    assert [(loop.op_name, loop.trips, loop.known) for loop in found.loops] == [
        ("outer", 4, True),
        ("inner", 5, True),
    ]  # 0, 2, 4, 6; 2 .. 6
    assert (found.executions, found.total_wire_bytes) == (20, 20 * 96 * 1.5)


def test_an_inner_loop_that_starts_where_the_outer_one_stands_is_unknown() -> None:
    lines = ("%seven = s32[] constant(7)", "%s = (s32[], s32[], f32[6,4]) tuple(%zero, %seven, %x)")
    triangle = LOOPS.replace("tuple(%two, %n, %x)", "tuple(%i, %n, %x)")
    with pytest.raises(HloError, match=r"loop w \(inner\)"):
        read(*lines, f"%w = (s32[], s32[], f32[6,4]) {WHILE.format('%s', '%outer')}", computations=triangle)


def test_a_loops_condition_runs_once_more_than_its_body() -> None:
    lines = ("%seven = s32[] constant(7)", "%s = (s32[], s32[], f32[6,4]) tuple(%zero, %seven, %x)")
    asks = "%x = f32[6,4] get-tuple-element(%p), index=2\n  %all = f32[6,4] all-reduce(%x), to_apply=%sum\n  ROOT %less"
    found = read(*lines, f"%w = (s32[], s32[], f32[6,4]) {WHILE.format('%s', '%inner')}", computations=LOOPS.replace("ROOT %less", asks))
    assert {c.name: c.executions for c in found} == {"all": 8, "y": 7}


def test_a_loop_of_unknown_turns_is_refused_unless_the_caller_says_how_many() -> None:
    line = f"%w = (s32[], s32[], f32[6,4]) {WHILE.format('%t', '%outer')}"
    with pytest.raises(HloError, match=r"loop w \(inner\) holds 1 collectives, y first, .* unknown_trips = 1"):
        read(line, computations=LOOPS)
    (found,) = read(line, computations=LOOPS, unknown_trips=3)
    assert [(loop.trips, loop.known) for loop in found.loops] == [(3, False), (3, False)]
    assert found.executions == 9


def test_a_loop_of_unknown_turns_without_collectives_is_none_of_our_business() -> None:
    silent = LOOPS.replace("all-reduce(%x), to_apply=%sum", "negate(%x)")
    assert read(f"%w = (s32[], s32[], f32[6,4]) {WHILE.format('%t', '%outer')}", computations=silent) == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bf16[8] ragged-all-to-all(%y, %y)", "c in main: the bytes of 'ragged-all-to-all'"),
        ("(bf16[8], u32[], token[]) send(%y, %n), channel_id=1", "c in main: the bytes of 'send'"),
        ("f32[6,4] all-reduce(%gone), to_apply=%sum", r"c in main: its operands \['gone'\] are not in the text"),
        ("f32[6,4] all-reduce(), to_apply=%sum", "its operands"),
        ("f32[6,4] all-reduce(%x), replica_groups=@groups, to_apply=%sum", "unknown form"),
    ],
)
def test_what_is_not_certain_is_refused(line: str, message: str) -> None:
    with pytest.raises(HloError, match=message):
        read(f"%c = {line}")


def test_transfers_to_the_host_are_no_collectives() -> None:
    assert read("%c = (bf16[8], u32[], token[]) send(%y, %n), channel_id=1, is_host_transfer=true") == ()


def test_totals_and_largest() -> None:
    lines = [
        '%a = f32[6,4] all-reduce(%x), to_apply=%sum, metadata={op_name="one"}',  # 144 on the wire
        '%b = f32[6,4] all-reduce(%x), to_apply=%sum, metadata={op_name="two"}',
        '%c = f32[6,4] all-reduce(%x), to_apply=%sum, metadata={op_name="two"}',
        '%d = bf16[32] all-gather(%y), dimensions={0}, metadata={op_name="two"}',  # 48
        "%e = bf16[16] all-gather(%y), replica_groups=[2,2]<=[4], dimensions={0}",  # 16
    ]
    found = read(*lines)
    assert totals(found) == [
        Total("all-reduce", 4, "", 3, 288, 432.0),
        Total("all-gather", 4, "", 1, 64, 48.0),
        Total("all-gather", 2, "", 1, 32, 16.0),
    ]
    assert largest(found, 2) == [Total("all-reduce", 4, "two", 2, 192, 288.0), Total("all-reduce", 4, "one", 1, 96, 144.0)]
    assert len(largest(found)) == 4
    text = MODULE.format(lines="\n".join(f"  {line}" for line in lines), computations="")
    assert math.isclose(wire_bytes(text), 496)
