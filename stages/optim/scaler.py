"""Dynamic loss scale for fp16: as large as overflow allows, as plain data. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleSettings:
    """When the scale moves.

    hysteresis: overflows before the scale shrinks, counted since it last grew; from then on each
    further one shrinks it again.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int = 1000
    backoff_factor: float = 0.5
    hysteresis: int = 2
    minimum: float = 1.0
    maximum: float = 2.0**32

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"scale from {self.minimum} over {self.initial} to {self.maximum}; expected ascending"
            )
        if self.growth_factor <= 1 or not 0 < self.backoff_factor < 1:
            raise ValueError(
                f"growth by {self.growth_factor}, backoff by {self.backoff_factor}; expected > 1 and < 1"
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(
                f"growth interval {self.growth_interval}, hysteresis {self.hysteresis}; expected 1 or more"
            )


class LossScaler:
    """The scale of the next step's loss.

    Powers of two by default, so that scaling and unscaling round nothing.
    """

    def __init__(self, settings: ScaleSettings | None = None) -> None:
        self.settings = settings or ScaleSettings()
        self.scale = self.settings.initial
        self._clean_steps = 0
        self._overflows = 0

    def update(self, *, found_non_finite: bool) -> None:
        """Takes note of one step: skipped for an overflow, or clean."""
        settings = self.settings
        if found_non_finite:
            self._clean_steps = 0
            self._overflows += 1
            if self._overflows >= settings.hysteresis:
                self.scale = max(self.scale * settings.backoff_factor, settings.minimum)
            return
        self._clean_steps += 1
        if self._clean_steps == settings.growth_interval:
            self._clean_steps = 0
            self._overflows = 0
            self.scale = min(self.scale * settings.growth_factor, settings.maximum)

    def state(self) -> dict[str, float | int]:
        """What a checkpoint keeps: numbers by name."""
        return {"scale": self.scale, "clean_steps": self._clean_steps, "overflows": self._overflows}

    def restore(self, state: dict[str, float | int]) -> None:
        """Goes on from what `state` gave.

        Raises:
            ValueError: Something is missing, unknown or out of range.
        """
        if set(state) != set(self.state()):
            raise ValueError(f"loss scale state has {sorted(state)}; expected {sorted(self.state())}")
        if not self.settings.minimum <= state["scale"] <= self.settings.maximum:
            raise ValueError(
                f"loss scale {state['scale']}; expected {self.settings.minimum} to {self.settings.maximum}"
            )
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._overflows = int(state["overflows"])
