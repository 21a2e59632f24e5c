from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from factories import tiny_config
from jax.profiler import ProfileData

from jaxprorl.monitoring import events
from jaxprorl.monitoring.profile import missed_steps, start_trace, stop_trace
from jaxprorl.monitoring.progress import Progress
from jaxprorl.monitoring.recorder import NO_LINES, Recorder
from jaxprorl.run_folder import RunFolder


def new_recorder(path: Path) -> Recorder:
    return Recorder(tiny_config(monitoring__tensorboard=False), RunFolder(path), Progress(4, False), ["task"], ["domain"], 0, NO_LINES)


def work(step: int) -> Callable[[jax.Array], jax.Array]:
    """A function whose compiled program is named after the step."""

    def function(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 300, lambda i, x: jnp.tanh(x @ x), x) + step  # long enough to be under way when the next step begins

    function.__name__ = f"work_of_step_{step}"
    return function


def programs(file: Path) -> set[str]:
    """Names of the compiled programs that ran during a trace."""
    events = [event for plane in ProfileData.from_file(str(file)).planes for line in plane.lines for event in line.events]
    return {str(value) for event in events for name, value in event.stats if name == "hlo_module"}


def test_the_steps_asked_for_are_traced_and_no_others(tmp_path: Path) -> None:
    config, folder, x = tiny_config(profile_steps=(1, 3)), RunFolder(tmp_path), jnp.zeros((256, 256))
    compiled = [jax.jit(work(step)).lower(x).compile() for step in range(4)]
    recorder, result = new_recorder(tmp_path), x
    for step in range(4):
        tracing = start_trace(config, folder, step, result, recorder)
        result = compiled[step](x)
        if tracing:
            stop_trace(step, result, recorder)
    assert {path.name for path in folder.profiles.iterdir()} == {"step_000001", "step_000003"}
    for traced in (1, 3):
        (file,) = (folder.profiles / f"step_{traced:06d}").rglob("*.xplane.pb")
        assert programs(file) == {f"jit_work_of_step_{traced}"}


def test_nothing_is_written_when_no_step_is_named(tmp_path: Path) -> None:
    assert not start_trace(tiny_config(), RunFolder(tmp_path), 0, (), new_recorder(tmp_path))
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize("when", ["before the trace", "while it is made"])
def test_a_trace_that_cannot_be_written_is_left_out_and_told_once(tmp_path: Path, when: str) -> None:
    config, folder, recorder = tiny_config(profile_steps=(0, 1)), RunFolder(tmp_path), new_recorder(tmp_path)
    if when == "before the trace":
        folder.profiles.write_text("a file in the folder's place")
    for step in range(2):
        if start_trace(config, folder, step, (), recorder):
            if when == "while it is made":
                folder.profiles.write_text("a file in the folder's place")
            stop_trace(step, (), recorder)
    (failed,) = (event for event in events.read(folder.events) if event["kind"] == "view_failed")
    assert (failed["step"], failed["view"]) == (0, "profile")


def test_steps_that_are_done_and_left_no_trace_are_missed(tmp_path: Path) -> None:
    config, folder = tiny_config(profile_steps=(1, 3, 5)), RunFolder(tmp_path)
    (folder.profiles / "step_000001").mkdir(parents=True)  # traced before the run was interrupted
    assert missed_steps(config, folder, 3) == []
    assert missed_steps(config, folder, 4) == [3]
    assert missed_steps(config, folder, 6) == [3, 5]
