"""What the tests of deployments share."""

from tests.support.referees import referee

__all__ = ["referee"]
