"""What the swaps of several engines took."""

from jaxprorl.rollout.engine import merge_swaps


def test_swaps_add_up_and_the_worst_counts() -> None:
    first = {"bytes": 8, "probe_nats": 0.5, "probe_mean_nats": 0.1, "lost_workers": 1, "time_load_s": 2.0, "time_swap_s": 3.0}
    second = {"bytes": 8, "probe_nats": 0.2, "probe_mean_nats": 0.2, "lost_workers": 2, "time_load_s": 4.0, "time_swap_s": 5.0}
    expected = {"bytes": 16, "probe_nats": 0.5, "probe_mean_nats": 0.2, "lost_workers": 3, "time_load_s": 4.0, "time_swap_s": 8.0}
    assert merge_swaps([first, {}, second]) == merge_swaps([second, first]) == expected
    assert merge_swaps([first]) == first
    assert merge_swaps([{}]) == merge_swaps([]) == {}
