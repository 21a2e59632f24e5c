"""What a reset resets: the reference, and named parts of an Optax state of any composition."""

from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from optax._src.transform import ScaleByRmsWithCountState, ScaleByRStdDevWithCountState  # Optax exports these four nowhere
from optax.schedules._inject import WrappedScheduleState
from optax.transforms._adding import WeightDecaySchedule

from jaxprorl.errors import ResetError
from jaxprorl.optimizer import make_optimizer
from jaxprorl.resets.warmup import WarmupState
from jaxprorl.state import TrainState, reference_of

# What a reset may take from a fresh state: averages of past gradients; the count that their bias correction (or, in Adafactor, their
# decay) goes by; the counts that schedules of the learning rate and of other hyperparameters go by.
Part = Literal["moments", "bias_count", "schedule_count"]

# `config.resets.optimizer` by name.
OPTIMIZER_SETS: dict[str, frozenset[Part]] = {
    "all": frozenset({"moments", "bias_count", "schedule_count"}),
    "moments_and_bias": frozenset({"moments", "bias_count"}),
    "moments": frozenset({"moments"}),
    "none": frozenset(),
}

# What every field of every known state is: a part, or "states" (one or more inside), "kept" by every reset, "cleared" by every reset.
FIELDS: dict[type, dict[str, Part | Literal["states", "kept", "cleared"]]] = {
    optax.EmptyState: {},
    optax.ScaleByAdamState: {"count": "bias_count", "mu": "moments", "nu": "moments"},
    optax.ScaleByAmsgradState: {"count": "bias_count", "mu": "moments", "nu": "moments", "nu_max": "moments"},
    optax.ScaleByLionState: {"count": "bias_count", "mu": "moments"},  # Lion counts, but nothing reads it
    optax.ScaleByRmsState: {"nu": "moments"},
    ScaleByRmsWithCountState: {"count": "bias_count", "nu": "moments"},
    optax.ScaleByRStdDevState: {"mu": "moments", "nu": "moments"},
    ScaleByRStdDevWithCountState: {"count": "bias_count", "mu": "moments", "nu": "moments"},
    optax.ScaleByRssState: {"sum_of_squares": "moments"},
    optax.FactoredState: {"count": "bias_count", "v_row": "moments", "v_col": "moments", "v": "moments"},
    optax.TraceState: {"trace": "moments"},
    optax.EmaState: {"count": "bias_count", "ema": "moments"},
    optax.ScaleByScheduleState: {"count": "schedule_count"},
    WeightDecaySchedule: {"count": "schedule_count"},
    WrappedScheduleState: {"count": "schedule_count"},
    WarmupState: {"updates_since_reset": "cleared"},
    optax.MaskedState: {"inner_state": "states"},
    optax.PartitionState: {"inner_states": "states"},
    optax.InjectStatefulHyperparamsState: {
        "count": "schedule_count",
        "hyperparams": "kept",  # set by hand, or computed from the schedules' states before each use
        "hyperparams_states": "states",
        "inner_state": "states",
    },
    optax.MultiStepsState: {
        # No update may mix gradients from before a reset, perhaps of a KL to another reference, with later ones.
        "mini_step": "cleared",
        "acc_grads": "cleared",
        "gradient_step": "schedule_count",  # the number of mini-steps may be scheduled by it
        "inner_opt_state": "states",
        "skip_state": "kept",
    },
    optax.ApplyIfFiniteState: {
        # A record of faults, and what stops a run of them; no statistic of the gradients.
        "notfinite_count": "kept",
        "last_finite": "kept",
        "total_notfinite": "kept",
        "inner_state": "states",
    },
}


def reset(state: TrainState, config: ConfigDict) -> TrainState:
    """What `config.resets` names starts afresh: the reference becomes the current policy, parts of the Optax state become new.

    ProRL v1 (arXiv 2505.24864, section 2.3.2) resets the reference and all of the optimizer, v2 the reference alone.
    Jit it with the state donated and `keep_unused`: else the arrays that are reset, being unread, are not given up.
    """
    reference = reference_of(state.params, config) if config.resets.reference else state.reference
    fresh = make_optimizer(config).init(state.params)
    return TrainState(state.params, reference, reset_opt_state(state.opt_state, fresh, OPTIMIZER_SETS[config.resets.optimizer]))


def reset_opt_state(opt_state: Any, fresh: Any, parts: Collection[Part]) -> Any:
    """An Optax state with `parts` taken from a fresh one and the rest as it was; structure, shapes and dtypes stay.

    Shardings are the caller's: jit it with those of the state as `out_shardings`.

    Args:
        opt_state: made of the states in `FIELDS`, in tuples and dicts.
        fresh: what the same optimizer's `init` gives.

    Raises:
        ResetError: a state, however deep inside, that `FIELDS` does not know.
    """
    kind: Any = type(opt_state)
    if kind in (tuple, list):
        return kind(reset_opt_state(old, new, parts) for old, new in zip(opt_state, fresh, strict=True))
    if kind in (dict, OrderedDict):
        return kind((name, reset_opt_state(old, fresh[name], parts)) for name, old in opt_state.items())
    if kind not in FIELDS:
        raise ResetError(
            f"optimizer state {kind.__module__}.{kind.__qualname__} with fields {list(getattr(kind, '_fields', []))}: unknown which of "
            "them are moments and which are counts; say so in FIELDS of jaxprorl/resets/optimizer.py"
        )
    values = {}
    for field, meaning in FIELDS[kind].items():
        old, new = getattr(opt_state, field), getattr(fresh, field)
        if meaning == "states":
            values[field] = reset_opt_state(old, new, parts)
        elif meaning == "cleared":
            values[field] = jax.tree.map(jnp.zeros_like, old)
        else:
            values[field] = jax.tree.map(lambda x, y: jnp.asarray(y, x.dtype), old, new) if meaning in parts else old
    return kind(**values)


def what_is_reset(reference: bool, optimizer: str) -> str:
    """Values of `config.resets` in words, e.g. "reference and optimizer (moments)"."""
    parts = {"all": ["optimizer"], "none": []}.get(optimizer, [f"optimizer ({optimizer})"])
    return " and ".join([*(["reference"] if reference else []), *parts])
