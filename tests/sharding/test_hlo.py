import pytest

from jaxprorl.sharding.hlo import HloError, device_groups, parse_module, permute_groups, shape_bytes

LINES = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[]}, replica_count=2, num_partitions=4

%inner (p: f32[4], q: (s32[], f32[4])) -> f32[4] {
  %p = f32[4]{0:T(128)S(1)} parameter(0)
  %q = (s32[]{:T(128)}, f32[4]{0:T(8,128)(2,1)}, /*index=2*/u32[2]{0:S(4)}) parameter(1)
  %r = f32[4]{0} get-tuple-element(%q), index=1
  ROOT %s.1 = f32[4]{0} add(%p, /*index=1*/%r), metadata={op_name="jit(f)/calls=%no/(a)" stack_frame_id=3}
}

ENTRY %main-2 (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %t = (s32[], f32[4]) custom-call(), custom_call_target="a", called_computations={%inner, %inner}
  ROOT %fusion = f32[4]{0} fusion(%x, %t), kind=kLoop, calls=%inner, backend_config={"calls":"b)"}
  %after = token[] after-all()
}
"""


def test_a_module_is_computations_of_instructions() -> None:
    module = parse_module(LINES)
    assert (module.entry, module.devices, list(module.computations)) == ("main-2", 8, ["inner", "main-2"])
    inner, main = module.computations.values()
    assert (inner.root, main.root) == ("s.1", "fusion")
    add = inner.instructions["s.1"]
    assert (add.opcode, add.operands, add.op_name, add.called("calls")) == ("add", ["p", "r"], "jit(f)/calls=%no/(a)", [])
    assert inner.instructions["q"].shape == "(s32[]{:T(128)}, f32[4]{0:T(8,128)(2,1)}, u32[2]{0:S(4)})"
    assert (inner.instructions["r"].attributes, inner.instructions["p"].argument) == ("index=1", "0")
    assert main.instructions["t"].called("calls", "called_computations") == ["inner", "inner"]
    assert (main.instructions["fusion"].called("calls"), main.instructions["fusion"].op_name) == (["inner"], "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no complete ENTRY"),
        (LINES.replace("ENTRY ", ""), "no complete ENTRY"),
        (LINES.rstrip().removesuffix("}"), "no complete ENTRY"),
        (LINES.replace("%r = ", "r : "), r"in computation inner: not an instruction: 'r : f32\[4\]"),
        (LINES.replace("parameter(0)", "parameter(0"), r"a parenthesis stays open: '\(0"),
    ],
)
def test_text_that_is_no_module_is_refused(text: str, message: str) -> None:
    with pytest.raises(HloError, match=message):
        parse_module(text)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)S(1)}", 30),
        ("pred[7]", 7),
        ("s4[3]{0:E(4)}", 2),  # packed: 12 bits
        ("u2[16]", 4),
        ("f8e4m3fn[10]", 10),
        ("f8e5m2[2,2]", 4),
        ("f4e2m1fn[10]", 5),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("f64[<=3]", 24),
        ("f32[0,5]", 0),
        ("token[]", 0),
        ("(f32[2]{0}, (bf16[4]{0}, u32[]{:S(2)}), s8[3])", 8 + 8 + 4 + 3),
    ],
)
def test_sizes(shape: str, size: int) -> None:
    assert shape_bytes(shape) == size


def test_a_type_of_unknown_width_is_refused() -> None:
    with pytest.raises(HloError, match=r"element type 'weird'"):
        shape_bytes("weird[4]")


STRIDED = ((0, 4), (1, 5), (2, 6), (3, 7))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
ALL = ((0, 1, 2, 3, 4, 5, 6, 7),)


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", PAIRS),
        ("channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", STRIDED),
        ("replica_groups={{0,1,2},{5}}", ((0, 1, 2), (5,))),
        ("replica_groups={}", ALL),
        ("dimensions={0}", ALL),
        ("replica_groups=[4,2]<=[8], dimensions={0}", PAIRS),
        ("replica_groups=[1,8]<=[8]", ALL),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", STRIDED),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", ALL),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, use_global_device_ids=true", HALVES),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", STRIDED),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", ALL),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {}", tuple((i,) for i in range(8))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['x'=8] {'x':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['x'=8] {'x':(4)2}", PAIRS),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_groups_of_every_form(attributes: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert device_groups(attributes, 8) == groups


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ("[2,4]<=[2,3]", "do not hold each of 8 devices once"),
        ("[2,2]<=[4]", "do not hold each of 8 devices once"),
        ("[8]<=[8]", "do not hold each of 8 devices once"),
        ("[4,2]<=[2,4]T(1,1)", "do not hold each of 8 devices once"),
        ("[4,2]<=[2,4]T(0)", "do not hold each of 8 devices once"),
        ("mesh['x'=6] {'x':(4)2}", "do not hold each of 8 devices once"),
        ("mesh['x'=8] {'x':(4)3}", "'x' of size 8 has no such part"),
        ("mesh['x'=8] {'x':(0)2}", "'x' of size 8 has no such part"),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", "'x' is no axis of the mesh, or is named twice"),
        ("mesh['x'=8] {'y'}", "'y' is no axis of the mesh, or is named twice"),
        ("{{0,1},{1,2}}", "name a device twice, or one beyond the 8"),
        ("{{0,8}}", "name a device twice, or one beyond the 8"),
    ],
)
def test_groups_that_are_none_are_refused(form: str, problem: str) -> None:
    with pytest.raises(HloError, match=problem):
        device_groups(f"channel_id=1, replica_groups={form}, dimensions={{0}}", 8)


@pytest.mark.parametrize(
    "form", ["mesh['a'=8], device_ids=([8]) {'a'}", "@empty", "[4,2]", "mesh[@m] {'x'}", "mesh['x'=8] {x}", "{{0,1,a}}"]
)
def test_groups_of_an_unknown_form_are_refused(form: str) -> None:
    with pytest.raises(HloError, match="of an unknown form"):
        device_groups(f"replica_groups={form}", 8)


def test_a_permutes_groups_are_its_rings_and_chains() -> None:
    assert permute_groups("channel_id=1, source_target_pairs={{0,1},{1,0},{2,3},{3,4}}") == ((0, 1), (2, 3, 4))
    assert permute_groups("source_target_pairs={{3,0},{0,1},{2,3},{1,2}}, x={}") == ((0, 1, 2, 3),)
    assert permute_groups("source_target_pairs={{5,5}}") == ((5,),)
