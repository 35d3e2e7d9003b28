"""What the tests on Ray share: one cluster for all of them, since a process can join but one."""

from tests.support.services import ray_port

__all__ = ["ray_port"]
