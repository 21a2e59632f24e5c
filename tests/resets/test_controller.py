import dataclasses
import inspect

from jaxprorl.resets.controller import BlindController


def steps(every_steps: int, count: int = 50) -> list[int]:
    return [step for step in range(count) if BlindController(every_steps).due(step)]


def test_a_reset_comes_every_n_steps_and_never_before_the_first() -> None:
    assert steps(10) == [10, 20, 30, 40]
    assert steps(1) == list(range(1, 50))
    assert steps(49) == [49]
    assert steps(50) == []


def test_0_means_never() -> None:
    assert steps(0) == []


def test_asking_changes_nothing() -> None:
    controller = BlindController(5)
    assert [controller.due(step) for step in (5, 5, 7, 5)] == [True, True, False, True]


def test_a_blind_controller_can_see_nothing_but_the_step() -> None:
    # Validation results, rewards or the clock have no way in: not by argument, not by state (frozen, one number).
    assert list(inspect.signature(BlindController.due).parameters) == ["self", "step"]
    assert [field.name for field in dataclasses.fields(BlindController)] == ["every_steps"]
    assert BlindController.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert set(BlindController.due.__code__.co_names) == {"every_steps"}
