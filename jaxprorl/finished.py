"""Runs that are over: the same command shows what they reached."""

import json
from typing import Any

from ml_collections import ConfigDict

from jaxprorl import streams
from jaxprorl.budget import is_over
from jaxprorl.checkpoint import read_host
from jaxprorl.commit import committed_steps
from jaxprorl.errors import ConfigError
from jaxprorl.evaluation.report import write_report
from jaxprorl.monitoring.views import Views, warning
from jaxprorl.run_folder import RunFolder, check_config, has_begun


def finished(config: ConfigDict, folder: RunFolder) -> dict[str, Any] | None:
    """The summary of a run that is over already."""
    if not folder.summary.is_file():
        return None
    summary: dict[str, Any] = json.loads(folder.summary.read_text())
    steps = summary["steps"]
    if steps != config.steps:
        saved = committed_steps(folder.checkpoints)
        if steps > config.steps or not saved or saved[-1] != steps or not is_over(config, read_host(folder.checkpoints, steps).run):
            return None
    if not folder.report.is_file():  # it was killed between the two, or could not write it
        views = Views()
        views.show("report", write_report, folder.path)
        for view, why in views.news().items():
            streams.say(warning(view, why))
    return summary


def read_only(config: ConfigDict, folder: RunFolder, reason: str) -> dict[str, Any]:
    """The summary of a run that is over, where nothing can be written.

    Raises:
        ConfigError: it is not over, or of another config.
    """
    check_config(config, folder)
    summary = finished(config, folder) if has_begun(folder) and config.on_existing == "resume" else None
    if summary is None:
        raise ConfigError(f"runs_dir = {config.runs_dir!r}: {reason}; allow writing there, or choose another one")
    return summary
