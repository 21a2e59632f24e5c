from pathlib import Path

import jax
import jax.numpy as jnp
from factories import tiny_config
from jax.profiler import ProfileData

from jaxprorl.monitoring.profile import start_trace, stop_trace
from jaxprorl.run_folder import RunFolder


def test_the_steps_asked_for_are_traced_and_no_others(tmp_path: Path) -> None:
    config, folder = tiny_config(profile_steps=(1, 3)), RunFolder(tmp_path)
    given = jnp.zeros(8)
    compiled = {step: jax.jit(traced(step)).lower(given).compile() for step in range(4)}
    for step in range(4):
        tracing = start_trace(config, folder, step)
        assert tracing == (step in (1, 3))
        result = compiled[step](given)
        if tracing:
            stop_trace(result)
    assert {path.name for path in folder.profiles.iterdir()} == {"step_000001", "step_000003"}
    for step in (1, 3):
        assert modules(folder.profiles / f"step_{step:06d}") == {f"jit_step_{step}"}


def test_nothing_is_written_when_no_step_is_named(tmp_path: Path) -> None:
    assert not start_trace(tiny_config(), RunFolder(tmp_path), 0)
    assert not list(tmp_path.iterdir())


def traced(step: int):  # type: ignore[no-untyped-def]
    def function(x):  # type: ignore[no-untyped-def]
        return jnp.sin(x) + step

    function.__name__ = f"step_{step}"
    return function


def modules(folder: Path) -> set[str]:
    """Names of the compiled programs in a trace."""
    (file,) = folder.rglob("*.xplane.pb")
    found = set()
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            found |= {dict(event.stats).get("hlo_module", "") for event in line.events}
    return {str(name) for name in found if name}
