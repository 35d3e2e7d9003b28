"""One Ray cluster for all tests of this folder, with the same tiny model behind both topologies."""

from tests.support.services import disaggregated, monolith, ray_port, tiny_folder

__all__ = ["disaggregated", "monolith", "ray_port", "tiny_folder"]
