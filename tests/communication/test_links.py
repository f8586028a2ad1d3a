"""Links between ranks: what a network's text says, and what a communication sends over which link, and for how long."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.communication.links import ACROSS, INSIDE, LATENCY, Network, Transfer
from recompute.communication.mesh import Mesh
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.ops.communication.base import Traffic

COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "Reduce")


def sent(network: Network, name: str, ranks: int, mesh: Mesh, axis: str = "dp") -> tuple[Traffic, Transfer]:
    x = TensorType.parse("f32[1024]")
    op = op_class(name)(axis=axis, ranks=ranks, number=0)
    y = op.infer(x)[0]
    return op.traffic(x, y), network.transfer(op, x, y, mesh)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node=8,nvlink=450GB/s,net=50GB/s", Network(8, 450e9, 50e9, LATENCY)),
        ("nvlink=1.5TB/s", Network(0, 1.5e12, 0.0, LATENCY)),
        ("net=400Gb/s, latency=2us", Network(1, 0.0, 50e9, 2e-6)),
        ("node=4,nvlink=2GiB/s,net=1e9,latency=0s", Network(4, 2.0 * 2**30, 1e9, 0.0)),
    ],
)
def test_the_text_of_a_network(text: str, found: Network) -> None:
    assert Network.parse(text) == found
    assert str(Network.parse("node=8,nvlink=450GB/s,net=50GB/s")) == "node=8,nvlink=450GB/s,net=50GB/s,latency=5us"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a rate is missing"),
        ("fast", "cannot read 'fast'"),
        ("nvlnk=5GB/s", "unknown 'nvlnk' .did you mean nvlink"),
        ("net=5GB/s,net=6GB/s", "'net' is given twice"),
        ("node=0,net=5GB/s", "node must be a whole number of at least 1"),
        ("nvlink=5GB/s,net=1GB/s", "say how many ranks a node has"),
        ("node=8,net=5GB/s", "need a rate within them"),
        ("node=1,nvlink=5GB/s", "need a rate between them"),
        ("net=-5GB/s", "net must be a rate above 0"),
        ("net=0", "net must be a rate above 0"),
        ("net=1e999", "net must be a rate above 0"),
        ("net=5GB/h", "net must be a rate above 0"),
        ("net=5GB/s,latency=3", "latency must be a time"),
        ("net=5GB/s,latency=-3us", "latency must be a time"),
    ],
)
def test_texts_that_are_no_network(text: str, says: str) -> None:
    with pytest.raises(rc.UsageError, match=says):
        Network.parse(text)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("ranks", "node"), [(1, 4), (2, 4), (8, 4), (8, 1), (8, 8), (16, 4), (16, 2)])
def test_all_bytes_go_over_one_link_or_the_other(name: str, ranks: int, node: int) -> None:
    traffic, found = sent(Network(node, 1e9, 1e8, 0.0), name, ranks, Mesh.of(dp=ranks))
    assert sum(found.bytes.values()) == traffic.bytes
    assert (ACROSS in found.bytes) == (ranks > node) and (INSIDE in found.bytes) == (min(node, ranks) > 1)


def test_times_by_hand() -> None:
    """8 ranks in nodes of 4: 1,024 elements are 4,096 bytes."""
    net = Network(4, 100.0, 10.0, 0.5)
    mesh = Mesh.of(dp=8)
    _, gather = sent(net, "AllGather", 8, mesh)  # one shard from the other node, then 3/4 of all 8 shards
    assert gather.bytes == {INSIDE: 6 * 4096, ACROSS: 4096}
    assert gather.seconds == pytest.approx(3 * 0.5 + 6 * 40.96 + 409.6)
    _, scatter = sent(net, "ReduceScatter", 8, mesh)
    assert scatter.bytes == {INSIDE: 6 * 512, ACROSS: 512}
    _, both = sent(net, "AllReduce", 8, mesh)
    assert both.bytes == {INSIDE: 12 * 512, ACROSS: 1024}
    _, parts = sent(net, "AllToAll", 8, mesh)  # to 4 ranks of the other node, beside those of the own one
    assert parts.bytes == {INSIDE: 3 * 512, ACROSS: 4 * 512}
    assert parts.seconds == pytest.approx(7 * 0.5 + 4 * 51.2)
    _, alone = sent(Network(8, 100.0, 10.0, 0.5), "AllToAll", 8, mesh)
    assert alone.seconds == pytest.approx(7 * 0.5 + 7 * 5.12)


def test_axes_of_a_mesh_use_their_own_links() -> None:
    """Ranks 0 to 3 and 4 to 7 are nodes: neighbours along the last axis share one, those along the first do not."""
    net, mesh = Network(4, 100.0, 10.0, 0.0), Mesh.of(dp=2, tp=4)
    assert list(sent(net, "AllGather", 4, mesh, axis="tp")[1].bytes) == [INSIDE]
    assert list(sent(net, "AllGather", 2, mesh, axis="dp")[1].bytes) == [ACROSS]


def test_messages_and_their_receipts_take_the_same_time() -> None:
    net, mesh = Network(2, 100.0, 10.0, 0.5), Mesh.of(pp=4)
    x, one = TensorType.parse("f32[10]"), TensorType.parse("u8[1]")
    for rank, peer, seconds in ((0, 1, 0.9), (1, 2, 4.5)):
        send = op_class("Send")(axis="pp", ranks=4, number=0, peer=peer)
        receive = op_class("Recv")(axis="pp", ranks=4, number=0, peer=rank, shape=(10,))
        assert net.transfer(send, x, one, mesh, rank).seconds == pytest.approx(seconds)
        assert net.transfer(receive, None, x, mesh, peer).seconds == pytest.approx(seconds)


def test_ranks_without_a_link_to_each_other() -> None:
    Network.parse("node=8,nvlink=1GB/s").check(Mesh.of(dp=8))
    with pytest.raises(rc.UsageError, match="more than the 8 of a node: give the rate between"):
        Network.parse("node=8,nvlink=1GB/s").check(Mesh.of(dp=16))


def test_nodes_of_unequal_numbers_of_members() -> None:
    """Nine ranks in nodes of eight: the one that is alone in its node gets all from the other, and is the slowest."""
    traffic, found = sent(Network(8, 100.0, 10.0, 0.0), "AllGather", 9, Mesh.of(dp=9))
    assert found.bytes == {ACROSS: traffic.bytes}
