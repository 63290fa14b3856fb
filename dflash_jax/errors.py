"""Every error a user can cause. Each message says what was expected, what came, and what to do."""

from collections.abc import Sequence


class DFlashError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(DFlashError):
    """A config.json asks for something that is malformed or not implemented."""


class UnsupportedModelError(ConfigError):
    """The architecture is not one of the known families."""


class CheckpointError(DFlashError):
    """A checkpoint folder or file is not usable. Carries every problem found, not only the first.

    Attributes:
      problems: one sentence per problem, in the order found.
    """

    def __init__(self, subject: str, problems: Sequence[str] | str = ()):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{subject}{':' if lines else ''}{lines}")


class DeviceError(DFlashError):
    """JAX starts no device: it was told to take one that is not there, or the device's driver or settings do not work."""


class PromptError(DFlashError):
    """A prompt is empty, too long, or of a kind that cannot be read."""


class ParameterError(DFlashError, ValueError):
    """A sampling parameter or option is outside its permitted range."""


class CapacityError(DFlashError):
    """The request does not fit into the page pool or the model length."""


class PairError(DFlashError):
    """Target and drafter do not belong together."""


class TokenizerError(DFlashError):
    """Text was given where no tokenizer is present, or a tokenizer file is unusable."""
