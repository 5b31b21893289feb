"""Predicts the time of a reshard across many nodes, and a lower bound for any schedule.

Pure, no torch. The modelled schedule has two levels. If a node needs a piece that none of its GPUs
holds, the piece is sent to it once, by the owning node that has the least to send, spread over all
NICs of both nodes. NVLink copies the piece to the sending NIC's GPU beforehand, and afterwards to
every GPU that needs it. Both levels work on chunks at the same time. Links and NICs are assumed to
run at constant rates; switches and congestion are not modelled. In the real schedule (crossing.py),
a GPU that owns the piece sends it to a GPU that needs it, so NICs may carry unequal loads
(`planned_ms`). `transfer_ms` is fitted to measurements within one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hybridrl.hybrid_engine.planning.pieces import Join, PieceKind, ReceiverGroup
from hybridrl.hybrid_engine.planning.senders import Demand, balance_senders

Wants = Counter[ReceiverGroup]
"""Number of pieces that a node needs from each receiver group."""

CHUNK_BYTES = 64 << 20

# Rate of one GPU's NVLink 4 in one direction. Measured on H200: 330 GB/s with NCCL, 363 GB/s with
# copies.
LINK_GB_PER_S = 345.0
# TRANSPORTS: for each transport, the fixed cost of a transfer over NVLink in ms, and a GPU's
# receive rate as a share of the link's rate. LOCAL_BYTES_PER_S: rate of copies within a GPU.
# LEAST_MS: cost of a reshard that copies nothing. Fitted to 4 x H200
# (benchmarks/results/reshard_h200.json).
TRANSPORTS = {"peer": (0.0, 362 / 345), "packed": (1.2, 330 / 345)}
LOCAL_BYTES_PER_S = 1.85e12
LEAST_MS = 0.1


class Cluster(BaseModel):
    """A cluster of equal nodes. Rates apply to one direction; both work at the same time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(ge=1, description="Number of nodes.")
    gpus_per_node: int = Field(ge=1, description="GPUs per node, all connected by NVLink.")
    link_gb_per_s: float = Field(gt=0, description="NVLink rate of one GPU, 1e9 bytes per second.")
    nic_gb_per_s: float = Field(gt=0, description="Rate of one network card, 1e9 bytes per second.")
    nics_per_node: int = Field(ge=1, description="Network cards per node.")
    latency_us: float = Field(ge=0, description="Fixed cost of one message, microseconds.")

    @property
    def link_rate(self) -> float:
        return self.link_gb_per_s * 1e9

    @property
    def node_rate(self) -> float:
        return self.nics_per_node * self.nic_gb_per_s * 1e9


@dataclass(frozen=True)
class Prediction:
    """Predicted load of the busiest node or GPU in one direction, and predicted time.

    Args:
        nic_receive_bytes, nic_send_bytes: Bytes of a node over all of its NICs.
        link_bytes: Bytes that a GPU receives or sends over NVLink.
        messages: Messages that a GPU receives, summed over both levels.
        bound_ms: Lower bound for any schedule, milliseconds: the time of the NICs, or that of a
            GPU's link together with its share of the NICs.
    """

    nic_receive_bytes: int
    nic_send_bytes: int
    link_bytes: int
    messages: int
    predicted_ms: float
    bound_ms: float


def predict(
    joined: Join, itemsize: int, cluster: Cluster, chunk_bytes: int = CHUNK_BYTES
) -> Prediction:
    """Predicts how long filling the targets takes on a cluster, with ranks ordered by node.

    `itemsize` is the size of an element, `chunk_bytes` the maximum size of a message.
    """
    nodes = _nodes(joined, cluster.gpus_per_node)
    # The pieces that a node needs, keyed by the target classes of its GPUs.
    wants: dict[tuple[int, ...], Wants] = {
        classes: Counter(joined.wanted_by(classes).values())
        for classes in dict.fromkeys(node.targets for node in nodes)
    }
    between = _between(joined, nodes, wants)
    balance_senders([demand for _, demand in between], len(nodes))
    crossing = np.zeros((len(nodes), len(nodes)), np.int64)
    for _, demand in between:
        demand.add_traffic(crossing)
    carried = _sending(nodes, between)
    for number, node in enumerate(nodes):
        carried[number] += node.receiving(wants[node.targets])
    link = int(itemsize * carried.max())
    crossing *= itemsize
    received, sent = int(crossing.sum(axis=0).max()), int(crossing.sum(axis=1).max())
    per_nic = -(-crossing // (cluster.nics_per_node * chunk_bytes))
    nic_messages = int(per_nic.sum(axis=0).max())
    link_messages = -(-link // chunk_bytes) + (cluster.gpus_per_node - 1 if link else 0)
    latency_s = cluster.latency_us / 1e6
    nic_s = max(received, sent) / cluster.node_rate + latency_s * nic_messages
    link_s = link / cluster.link_rate + latency_s * link_messages
    least_sent = itemsize * _least_largest_sender([demand for _, demand in between])
    needed = itemsize * max(int(node.needed.max()) for node in nodes)
    # NICs add to a GPU's rate only if pieces are sent between nodes.
    gpu_rate = cluster.link_rate + bool(received) * cluster.node_rate / cluster.gpus_per_node
    # One level waits until the other has transferred the first chunk.
    num_chunks = -(-max(received, sent) // (cluster.nics_per_node * chunk_bytes))
    wait_s = min(nic_s, link_s) / max(num_chunks, 1)
    return Prediction(
        nic_receive_bytes=received,
        nic_send_bytes=sent,
        link_bytes=link,
        messages=nic_messages + link_messages,
        predicted_ms=1e3 * (max(nic_s, link_s) + wait_s),
        bound_ms=1e3 * max(max(received, least_sent) / cluster.node_rate, needed / gpu_rate),
    )


def planned_ms(traffic: np.ndarray, cluster: Cluster) -> float:
    """Returns the milliseconds of a plan in which each rank uses its own share of the NICs.

    `traffic` has the bytes from each rank (outer index) to each (inner), as in `Plan.traffic`.
    """
    node = np.arange(len(traffic)) // cluster.gpus_per_node
    crosses = node[:, None] != node[None, :]
    across, inside = traffic * crosses, traffic * ~crosses
    np.fill_diagonal(inside, 0)
    nic_rate = cluster.node_rate / cluster.gpus_per_node
    nic_s = max(across.sum(axis=0).max(), across.sum(axis=1).max()) / nic_rate
    link_s = max(inside.sum(axis=0).max(), inside.sum(axis=1).max()) / cluster.link_rate
    messages = -(-traffic // CHUNK_BYTES)
    np.fill_diagonal(messages, 0)
    latency_ms = cluster.latency_us / 1e3 * int(messages.sum(axis=0).max())
    return 1e3 * float(max(nic_s, link_s)) + latency_ms


def transfer_ms(
    transport: str, busiest_bytes: int, local_bytes: int, link_gb_per_s: float = LINK_GB_PER_S
) -> float:
    """Predicts the time of a reshard within one node, in milliseconds.

    Args:
        transport: A key of TRANSPORTS.
        busiest_bytes: Bytes that the busiest rank receives or sends, whichever is more.
        local_bytes: Bytes that a rank copies within its own GPU at the same time.
        link_gb_per_s: Rate of one GPU's link in one direction, 1e9 bytes per second.
    """
    fixed_ms, share = TRANSPORTS[transport]
    link_ms = fixed_ms + busiest_bytes / (share * link_gb_per_s * 1e6) if busiest_bytes else 0.0
    return LEAST_MS + max(link_ms, 1e3 * local_bytes / LOCAL_BYTES_PER_S)


class _Node:
    """A node whose GPUs have given source and target classes; amounts are numbers of elements."""

    def __init__(self, kinds: Sequence[PieceKind], sources: Sequence[int], targets: Sequence[int]):
        self._kinds, self._sources, self.targets = kinds, sources, tuple(targets)
        self.needed = np.zeros(len(sources), np.int64)
        self._receiving: np.ndarray | None = None

    def holders(self, kind: int) -> list[int]:
        """Returns the node's GPUs that hold pieces of this kind."""
        owners = self._kinds[kind].owners
        return [gpu for gpu, number in enumerate(self._sources) if number in owners]

    def receiving(self, wants: Wants) -> np.ndarray:
        """Returns each GPU's received and sent elements on its link, of shape (2, GPUs).

        A piece from another node lands on a GPU that needs it. If the NICs would then carry unequal
        loads, some pieces land on other GPUs, which forward them over NVLink.
        """
        if self._receiving is not None:
            return self._receiving
        landing, supply = [], []
        for (kind, targets), count in wants.items():
            holders, size = self.holders(kind), self._kinds[kind].volume
            needy = [
                gpu
                for gpu, number in enumerate(self.targets)
                if number in targets and gpu not in holders
            ]
            self.needed[needy] += count * size
            if needy and holders:
                supply.append(Demand(needy, np.array(holders), count, size))
            elif needy:
                landing.append(Demand([0], np.array(needy), count, size))
        gpus = len(self._sources)
        out, landed = balance_senders(supply, gpus), balance_senders(landing, gpus)
        into = self.needed - np.minimum(landed, landed.sum() / gpus)
        self._receiving = np.stack([into, out + (into.sum() - out.sum()) / gpus])
        return self._receiving


def _nodes(joined: Join, gpus: int) -> list[_Node]:
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], _Node] = {}
    nodes = []
    for start in range(0, len(joined.sources.of_rank), gpus):
        of_rank = joined.sources.of_rank, joined.targets.of_rank
        sources, targets = (tuple(classes[start : start + gpus]) for classes in of_rank)
        node = _Node(joined.kinds, sources, targets)
        nodes.append(found.setdefault((sources, targets), node))
    return nodes


def _between(
    joined: Join, nodes: Sequence[_Node], wants: Mapping[tuple[int, ...], Wants]
) -> list[tuple[int, Demand]]:
    demands = []
    kinds = range(len(joined.kinds))
    owning = [[i for i, node in enumerate(nodes) if node.holders(kind)] for kind in kinds]
    for classes, wanted in wants.items():
        alike = [number for number, node in enumerate(nodes) if node.targets == classes]
        counts: Counter[int] = Counter()
        for (kind, _), count in wanted.items():
            counts[kind] += count
        for kind, count in counts.items():
            receivers = [number for number in alike if number not in owning[kind]]
            if receivers:
                size = joined.kinds[kind].volume
                demands.append((kind, Demand(receivers, np.array(owning[kind]), count, size)))
    return demands


def _sending(nodes: Sequence[_Node], between: Sequence[tuple[int, Demand]]) -> np.ndarray:
    shares: list[list[Demand]] = [[] for _ in nodes]
    for kind, demand in between:
        for number, count in zip(demand.senders.tolist(), demand.send_counts.tolist(), strict=True):
            if count:
                holders = np.array(nodes[number].holders(kind))
                shares[number].append(Demand([0], holders, count, demand.size))
    gpus = len(nodes[0].targets)
    found = []
    for demands in shares:
        own = balance_senders(demands, gpus)
        even = own.sum() / gpus
        found.append(np.stack([np.maximum(even - own, 0), np.maximum(own - even, 0)]))
    return np.stack(found)


def _least_largest_sender(demands: Sequence[Demand]) -> float:
    """Returns the maximum, over sets of senders, of the number of elements that only the set holds,
    divided by the size of the set.
    """
    only_from: Counter[frozenset[int]] = Counter()  # elements, by the nodes that may send them
    for demand in demands:
        only_from[frozenset(demand.senders.tolist())] += demand.total * demand.size
    return max(
        (sum(n for who, n in only_from.items() if who <= some) / len(some) for some in only_from),
        default=0.0,
    )
