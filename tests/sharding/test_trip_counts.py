import pytest

from jaxprorl.sharding.hlo import parse_module
from jaxprorl.sharding.trip_counts import SAME, nothing_known, trip_count

# A loop as TPU prints it: nothing says how often it turns. `step` and `goes_on` see the tuple's elements %i, %n and %j.
LOOP = """
HloModule m
%one_more (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = s32[] add(%a, %b)
}}
%condition (p: (s32[], s32[], s32[])) -> pred[] {{
  %p = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %limit = s32[]{{:T(128)}} constant({limit})
  ROOT %goes_on = pred[] {goes_on}
}}
%body (q: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {{
  %q = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %n = s32[] get-tuple-element(%q), index=1
  %j = s32[] get-tuple-element(%q), index=2
  %by = s32[] constant({by})
  %next = s32[] {step}
  %seven = s32[] constant(7)
  ROOT %t = (s32[], s32[], s32[]) tuple(%next, %n, %seven)
}}
ENTRY %main (x: s32[]) -> s32[] {{
  %x = s32[] parameter(0)
  %zero = s32[] constant({first})
  %start = s32[] copy(%zero)
  %six = s32[] constant(6)
  %t = (s32[], s32[], s32[]) tuple(%start, %six, %x)
  %loop = (s32[], s32[], s32[]) while(%t), condition=%condition, body=%body
  ROOT %r = s32[] get-tuple-element(%loop), index=0
}}
"""
BELOW_LIMIT = "compare(%i, %limit), direction=LT"


def turns(first: int = 0, limit: int = 5, goes_on: str = BELOW_LIMIT, step: str = "add(%i, %by)", by: int = 1) -> int | None:
    module = parse_module(LOOP.format(first=first, limit=limit, goes_on=goes_on, step=step, by=by))
    main = module.computations["main"]
    return trip_count(module, main, main.instructions["loop"], nothing_known)


def test_a_counter_is_followed_from_its_first_value() -> None:
    assert turns() == 5
    assert turns(first=2, limit=20, by=3) == 6  # 2, 5, .. 17
    assert turns(first=2, limit=20, by=9) == 2  # 2, 11
    assert turns(first=5) == turns(first=9) == 0
    assert turns(first=-3, limit=-1) == 2


def test_every_comparison_and_either_direction() -> None:
    assert turns(goes_on="compare(%i, %limit), direction=LE") == 6
    assert turns(first=9, by=-2, goes_on="compare(%i, %limit), direction=GT") == 2  # 9, 7
    assert turns(first=9, by=-2, goes_on="compare(%i, %limit), direction=GE") == 3
    assert turns(goes_on="compare(%limit, %i), direction=GT") == 5
    assert turns(limit=4, by=2, goes_on="compare(%i, %limit), direction=NE") == 2
    assert turns(first=3, limit=3, goes_on="compare(%i, %limit), direction=EQ") == 1
    assert turns(first=9, by=2, step="subtract(%i, %by)", goes_on="compare(%i, %limit), direction=GT") == 2
    assert turns(first=1, limit=100, by=2, step="multiply(%i, %by)") == 7  # 1, 2, .. 64


def test_limits_in_the_tuple_and_steps_in_fusions() -> None:
    assert turns(goes_on="compare(%i, %n), direction=LT") == 6
    assert turns(step="fusion(%i, %by), kind=kLoop, calls=%one_more") == 5
    assert turns(step="call(%i, %by), to_apply=%one_more") == 5
    assert turns(limit=30, step="add(%i, %n)") == 5


@pytest.mark.parametrize("opcode", SAME)
def test_a_copy_is_what_it_copies(opcode: str) -> None:
    text = LOOP.format(first=0, limit=5, goes_on=BELOW_LIMIT, step="add(%i, %by)", by=1).replace("copy(", f"{opcode}(")
    module = parse_module(text)
    main = module.computations["main"]
    assert trip_count(module, main, main.instructions["loop"], nothing_known) == 5


def test_a_loop_that_depends_on_data_or_never_ends_is_unknown() -> None:
    assert turns(step="add(%i, %j)") is None  # j is an argument of the program in the first turn
    assert turns(step="custom-call(%i), custom_call_target=any") is None
    assert turns(by=0) is None
    assert turns(goes_on="compare(%i, %absent), direction=LT") is None


@pytest.mark.parametrize(("first", "expected"), [(0, 5), (4, 1)])
def test_what_the_compiler_says_counts_first(first: int, expected: int) -> None:
    text = LOOP.format(first=first, limit=5, goes_on=BELOW_LIMIT, step="add(%i, %by)", by=1)
    known = text.replace("body=%body", 'body=%body, backend_config={"known_init_step":{"init":"0"},"known_trip_count":{"n":"28"}}')
    for module, count in ((parse_module(text), expected), (parse_module(known), 28)):
        main = module.computations["main"]
        assert trip_count(module, main, main.instructions["loop"], nothing_known) == count
