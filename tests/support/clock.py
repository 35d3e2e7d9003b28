"""Time that passes when a test says so."""


class Clock:
    """Seconds that a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
