"""Dynamic loss scale for fp16: as large as overflow allows, as plain data. No torch."""

from __future__ import annotations

from stages.training import LossScaleConfig


class LossScaler:
    """The scale of the next step's loss.

    Powers of two, so that scaling and unscaling round nothing.
    """

    def __init__(self, settings: LossScaleConfig | None = None) -> None:
        self.settings = settings or LossScaleConfig()
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
