"""The clock of a step among ranks: transfers beside computation, waits, queues."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.communication.links import Network
from recompute.communication.mesh import Mesh
from recompute.passes.communication.clock import Exchange, times
from recompute.passes.offloading.transfers import StepTimes, simulate

NETWORK = Network(0, 16.0, 0.0, 1.0)
TWO = """program p {
  input %x: f32[8]
  %a: f32[8] = Exp(%x)
  communicate %s: f32[16] = AllGather(%a) {axis="dp", ranks=2, number=0}
  %b: f32[8] = Exp(%a)
  communicate %t: f32[16] = AllGather(%b) {axis="dp", ranks=2, number=NUMBER, channel="CHANNEL"}
  %c: f32[8] = Exp(%b)
  communicate %y: f32[16] = CommWait(%s, %a)
  %d: f32[16] = Exp(%y)
  communicate %z: f32[16] = CommWait(%t, %b)
  output %c, %d, %z
}"""


def clock(channel: str = "dp", number: int = 1) -> StepTimes:
    block = rc.verify(rc.parse(TWO.replace("CHANNEL", channel).replace("NUMBER", str(number))))
    return times(block, lambda op: 1.0, Exchange(NETWORK, Mesh.of(dp=2)))


def test_by_hand() -> None:
    """Each takes 1 s of latency and 32 bytes at 16 a second; the second waits for the first."""
    found = clock()
    assert [(t.name, t.begin, t.end, t.stall) for t in found.transfers] == [("s", 1, 4, 1), ("t", 4, 7, 2)]
    assert (found.compute, found.stalls, found.seconds) == (4, 3, 7)
    assert found.starts == (0, 1, 1, 2, 2, 3, 4, 5)
    assert (found.moving, found.hidden) == (6, 3)
    assert found.busy() == {"dp": 6, "nvlink": 6}


def test_other_channels_share_the_link() -> None:
    found = clock("other", 0)
    assert [(t.begin, t.end) for t in found.transfers] == [(1, 4), (4, 7)]
    assert found.busy() == {"dp": 3, "nvlink": 6, "other": 3}


def test_other_links_are_used_at_the_same_time() -> None:
    text = TWO.replace("CHANNEL", "far").replace("NUMBER", "0")
    lines = [line.replace('"dp"', '"pp"') if '"far"' in line else line for line in text.splitlines()]
    block = rc.verify(rc.parse("\n".join(lines)))
    found = times(block, lambda op: 1.0, Exchange(Network(2, 16.0, 16.0, 1.0), Mesh.of(pp=2, dp=2)))
    assert [(t.begin, t.end) for t in found.transfers] == [(1, 4), (2, 5)]
    assert found.busy() == {"dp": 3, "nvlink": 3, "far": 3, "net": 3}
    assert found.moving == 4


def test_without_a_network_communication_takes_no_time() -> None:
    block = rc.parse(TWO.replace("CHANNEL", "dp").replace("NUMBER", "1"))
    found = simulate(block, lambda op: 0.0 if op.op.communicates else 1.0)
    assert (found.seconds, found.transfers) == (4, ())


def test_what_is_waited_for_at_once_is_not_hidden() -> None:
    lines = TWO.replace("CHANNEL", "dp").replace("NUMBER", "1").splitlines()
    order = [*lines[:4], lines[7], lines[4], lines[5], lines[9], lines[6], lines[8], *lines[10:]]
    found = times(rc.verify(rc.parse("\n".join(order))), lambda op: 1.0, Exchange(NETWORK, Mesh.of(dp=2)))
    assert (found.stalls, found.hidden, found.moving) == (6, 0, 6)


@pytest.mark.parametrize("name", ["h100-80", "H200-141", "a100-80", "rtx-4090-24"])
def test_devices_with_their_memory(name: str) -> None:
    assert rc.cost.device(name).memory >> 30 == int(name.rpartition("-")[2])
