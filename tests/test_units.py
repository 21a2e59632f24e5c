import pytest

from jaxprorl.units import size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 kB"),
        (512, "0.5 kB"),
        (115_840, "115.8 kB"),
        (999_000, "999.0 kB"),
        (1_000_000, "1.0 MB"),
        (64e6, "64.0 MB"),
        (3.09e9, "3.09 GB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_fits(count: float, text: str) -> None:
    assert size_text(count) == text
