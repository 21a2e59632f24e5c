"""When to reset. This controller is blind: the step number is all it ever sees, validation results cannot reach it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlindController:
    """Resets every `every_steps` steps; 0 = never."""

    every_steps: int

    def due(self, step: int) -> bool:
        """True when a reset comes right before step `step` (counted from 0). Depends on nothing else, not even on the run's length."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0
