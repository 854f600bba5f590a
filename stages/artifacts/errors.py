"""The errors that end a run, one type per cause.

Every message says what was found, what was expected and what to do. The composer turns a
`StageError` into exit code 2, one readable message and `error.json`.
"""

from __future__ import annotations


class StageError(Exception):
    """A refusal that the user can act on.

    Args:
        message: What was found, what was expected, what to do.
        key: The configuration key at fault, or "".
        found: What was found, as text.
        expected: What was expected, as text.
        least_feasible_bytes: The smallest budget that would plan, where that is the cause.
    """

    kind = "error"

    def __init__(
        self,
        message: str,
        *,
        key: str = "",
        found: str = "",
        expected: str = "",
        least_feasible_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.found = found
        self.expected = expected
        self.least_feasible_bytes = least_feasible_bytes

    def to_record(self) -> dict[str, object]:
        """The content of `error.json`."""
        return {
            "kind": self.kind,
            "message": str(self),
            "key": self.key,
            "found": self.found,
            "expected": self.expected,
            "least_feasible_bytes": self.least_feasible_bytes,
        }


class ConfigError(StageError):
    """A configuration value or key that cannot be used."""

    kind = "config"


class TraceError(StageError):
    """A model that cannot be captured exactly; names module, file and line."""

    kind = "trace"


class ArtifactError(StageError):
    """An artifact that is damaged, crafted, or of another version."""

    kind = "artifact"


class InfeasibleBudgetError(StageError):
    """A budget under the least one that plans."""

    kind = "infeasible_budget"


class StorageError(StageError):
    """A tier (host memory, disk) that is short, broken or unwritable."""

    kind = "storage"


class DataError(StageError):
    """Training data that does not fit the model or the configuration."""

    kind = "data"


class NumericsError(StageError):
    """Training that cannot go on: non-finite gradients in too many consecutive steps."""

    kind = "numerics"
