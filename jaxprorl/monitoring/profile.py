"""Traces of single steps for TensorBoard, XProf or Perfetto, by jax.profiler."""

from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxprorl.monitoring.recorder import Recorder
from jaxprorl.run_folder import RunFolder

VIEW = "profile"
_under_way = False  # JAX makes one trace at a time, and this one is ours


def start_trace(config: ConfigDict, folder: RunFolder, step: int, results: Any, recorder: Recorder) -> bool:
    """Starts the trace of a step that `config.profile_steps` names, into `profiles/step_NNNNNN`; whether it did.

    Args:
        results: arrays of the step before, which is waited for: the devices may still be at work on it.
    """
    global _under_way
    if step not in config.profile_steps:
        return False
    jax.block_until_ready(results)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would be in it, and slow the step down

    def start() -> bool:
        jax.profiler.start_trace(_trace(folder, step), profiler_options=options)
        return True

    _under_way = bool(recorder.view(step, VIEW, start))
    return _under_way


def missed_steps(config: ConfigDict, folder: RunFolder, step: int) -> list[int]:
    """Steps of `config.profile_steps` that a run which goes on with `step` has behind it, without a trace of them."""
    return [named for named in config.profile_steps if named < step and not _trace(folder, named).is_dir()]


def stop_trace(step: int, results: Any, recorder: Recorder) -> None:
    """Ends it once the arrays in `results` are there: devices would otherwise still be at work on the step."""
    jax.block_until_ready(results)
    recorder.view(step, VIEW, end_trace)


def end_trace() -> None:
    """Ends the trace under way, if there is one: else an error in its step would leave the process tracing."""
    global _under_way
    if _under_way:
        _under_way = False
        jax.profiler.stop_trace()


def _trace(folder: RunFolder, step: int) -> Path:
    return folder.profiles / f"step_{step:06d}"
