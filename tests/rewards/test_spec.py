import pytest

from jaxprorl.rewards.registry import RewardError
from jaxprorl.rewards.spec import Part, parse, render


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("my:score", [(1.0, "my:score")]),
        ("my:score + 0.2 * my:brevity", [(1.0, "my:score"), (0.2, "my:brevity")]),
        ("my:score+0.2*my:brevity", [(1.0, "my:score"), (0.2, "my:brevity")]),
        (" 2*a.b:c - 1e-3 * d:E.f ", [(2.0, "a.b:c"), (-1e-3, "d:E.f")]),
        ("- 0.5 * my:length + my:score", [(-0.5, "my:length"), (1.0, "my:score")]),
        ('my:score + 3 * pickle:"runs + more/a b.pkl"', [(1.0, "my:score"), (3.0, 'pickle:"runs + more/a b.pkl"')]),
    ],
)
def test_a_sum_is_read_and_written_back(text: str, parts: list[tuple[float, str]]) -> None:
    expected = tuple(Part(*part) for part in parts)
    assert parse(text) == expected
    assert parse(render(expected)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("my:score my:brevity", "without \\+ or -"),
        ("my:score +", "no function is named"),
        ("my:score + * my:brevity", "no function is named"),
        ("0x10 * my:score", "weight 0x10"),
        ("1e999 * my:score", "weight 1e999"),
        ('pickle:"half', "no function is named|without"),
        ("", "weighted sum"),
    ],
)
def test_what_is_no_sum_is_refused_with_the_whole_text(text: str, says: str) -> None:
    with pytest.raises(RewardError, match=says) as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_a_stored_function_is_named_by_its_file() -> None:
    (part,) = parse('pickle:"a/\\"b\\".pkl"')
    assert str(part.stored) == 'a/"b".pkl'
    assert parse("my:score")[0].stored is None
