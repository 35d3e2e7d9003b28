"""The nodes that Ray reserved for the ranks of a replica's vLLM, where Ray places them.

When such a node dies, vLLM 0.32 takes no notice: it waits for an answer of the lost rank, and so do all requests. Ray
notices within seconds, and reserves another node in its place, where no rank is.
"""

import multiprocessing
from typing import Any

from ray.util import get_current_placement_group, placement_group_table

from speculative.errors import EngineFault


class RankNodes:
    """Nodes of the replica in whose process it is made."""

    def __init__(self) -> None:
        self._group = get_current_placement_group()
        self._nodes = self._reserved()

    def check_health(self) -> None:
        """Raise if one of them is gone, and end what waits for its ranks."""
        now = self._reserved()
        lost = sorted({node for bundle, node in self._nodes.items() if now.get(bundle) != node})
        if lost:
            for process in multiprocessing.active_children():  # vLLM's, without which requests end with an error
                process.kill()
            raise EngineFault(
                f"A node with ranks of this replica's vLLM died ({', '.join(lost)}); the replica stops, and restarts "
                "where GPUs are free."
            )

    def _reserved(self) -> dict[Any, str]:
        """Bundle -> the id of its node; without those that have none at present."""
        table = placement_group_table(self._group)
        return {bundle: node for bundle, node in table["bundles_to_node_id"].items() if node}
