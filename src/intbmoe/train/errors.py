"""Errors that can end a training run; each message says what to do."""

import signal

OUT_OF_MEMORY = "out of memory"


def lacks_memory(error: Exception) -> bool:
    """Whether the device is out of memory: CUDA's errors have several classes, the CPU's has none of its own."""
    told = str(error).lower()
    return isinstance(error, RuntimeError) and (OUT_OF_MEMORY in told or "can't allocate memory" in told)


class TrainingError(RuntimeError):
    """Training cannot start, continue or be read back; the message says why and what to do."""


class DamagedFileError(TrainingError):
    """A file of a run or checkpoint is missing, truncated, altered or of the wrong kind."""


class RunConflictError(TrainingError):
    """The run directory belongs to another configuration, or another process is training in it."""


class NonFiniteLossError(TrainingError):
    """Training has diverged: a loss, a gradient, a metric or a weight is not a finite number."""


class CaptureError(TrainingError):
    """The step cannot be recorded as a CUDA graph."""


class LostRankError(TrainingError):
    """Another rank has ended or does not answer."""


class OutOfMemoryError(TrainingError):
    """The device has too little memory for a step."""


class DiskFullError(TrainingError):
    """The disk is full."""


class TrainingInterrupted(SystemExit):
    """Ctrl-C or SIGTERM, after the checkpoint is saved. Ends the process with 128 + the signal, as a shell expects."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.message = message

    def __str__(self) -> str:
        return f"{signal.Signals(self.signum).name}: {self.message}"
