"""Which stages share their programs."""

from typing import Any

import jax
import pytest
from factories import tiny_config, tiny_model

from jaxprorl.executables import Plan, program_key, step_parts
from jaxprorl.models.compute import Compute
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.start import abstract_params
from jaxprorl.state import abstract_state, state_shardings

# What log-probs and updates read, and what they do not, with another value.
READ = {
    "rollout__samples_per_prompt": 2, "rollout__temperature": 1.0, "rollout__max_prompt_tokens": 6, "rollout__max_response_tokens": 8,
    "optimizer__learning_rate": 1e-3, "algorithm__clip_low": 0.1,
}  # fmt: skip
NOT_READ = {
    "rollout__slots": 32, "rollout__max_staleness": 3, "shaping__stopping": "overlong",
    "filtering__rule": "accuracy", "data__mix": ("a",), "resets__every_steps": 3,
}  # fmt: skip


def test_configs_share_programs_if_they_differ_in_nothing_that_these_read() -> None:
    key = program_key(tiny_config())
    assert all(program_key(tiny_config(**{field: value})) == key for field, value in NOT_READ.items())
    assert all(program_key(tiny_config(**{field: value})) != key for field, value in READ.items())


@pytest.mark.slow
def test_programs_of_equal_keys_are_the_same_instruction_by_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, model = make_mesh("dp", jax.devices()[:2]), tiny_model()
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: lowered.as_text())

    def programs(**changes: Any) -> list[Any]:
        config = tiny_config(**changes)
        shardings = state_shardings(config, model, mesh)
        state = abstract_state(config, abstract_params(model, shardings.params), shardings)
        return [make() for make in step_parts(Plan("", config, Compute(mesh=mesh), ()), model, mesh, state, shardings)]

    assert programs() == programs(**NOT_READ)
    assert all(a != b for a, b in zip(programs(), programs(rollout__temperature=1.0), strict=True))
