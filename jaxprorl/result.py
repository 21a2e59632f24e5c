"""What `train` gives back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxprorl.run_folder import RunFolder


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        summary: the content of `summary.json`.
        folder: of the run, absolute.
    """

    summary: dict[str, Any]
    folder: Path

    @property
    def report(self) -> Path:
        """The report, one HTML file."""
        return RunFolder(self.folder).report

    @property
    def model(self) -> Path:
        """The trained model, an ordinary Hugging Face folder."""
        return RunFolder(self.folder).model

    @property
    def metrics(self) -> Path:
        """One JSON line of numbers per step."""
        return RunFolder(self.folder).metrics

    @property
    def events(self) -> Path:
        """One JSON line per decision."""
        return RunFolder(self.folder).events

    @property
    def samples(self) -> Path:
        """A folder with one Parquet file per step."""
        return RunFolder(self.folder).samples
