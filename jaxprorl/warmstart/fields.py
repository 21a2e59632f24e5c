"""The part of a config that decides what start model is made. Nothing here touches JAX."""

from collections.abc import Mapping
from typing import Any

ROLLOUT_FIELDS = ("max_prompt_tokens", "max_response_tokens", "slots", "decode_chunk_tokens")
OF_THE_RL_RUN = (
    ("data", "source"),
    ("data", "on_conflicting_answers"),
    ("model", "path"),
    ("model", "reference_dtype"),
    ("model", "attention"),
)


def start_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that the start model depends on, of a config as nested dicts; the same shape with the others left out."""
    fields: dict[str, Any] = {name: dict(config[name]) for name in ("model", "data", "warmstart", "mesh")}
    for section, field in OF_THE_RL_RUN:
        fields[section].pop(field)
    fields["rollout"] = {name: config["rollout"][name] for name in ROLLOUT_FIELDS}
    return fields | {"seed": config["seed"]}
