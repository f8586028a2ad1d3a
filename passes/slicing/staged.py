"""Pipelines: a rank runs the operators of its own stages, for all micro-batches, in the order of a schedule.

The slices are those of data parallelism (ranks.py), and so is the tree in which gradients are added up: so a pipeline
has the bits of one rank that runs all stages.  A border between stages becomes a `Send` on one rank and a `Recv` on the
other, each border and direction on a channel of its own: then no order of messages can make ranks wait for each other
in a circle, unless one waits for something that is computed later.  A send is awaited before the next one on its
channel.

What is the sum over micro-batches, such as the gradient of a parameter that two stages read, goes to the ranks that
need it when all micro-batches have run.  Operators and parameters of other stages are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...errors import UsageError
from ...language.axes import Cut
from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.types import TensorType
from ...ops.communication.border import Border
from ...ops.communication.messages import Recv, Send
from ..cleanup.dead_code import prune
from ..pipelines.borders import FORWARD_ROLES, homes
from ..pipelines.schedules import BACKWARD, FORWARD, WEIGHTS, Pipe, Slot
from .ranks import RankPieces, Share
from .region import Graph, Region

#: slots before its own in which a rank begins to receive what a slot needs
AHEAD = 1


class Stagewise:
    """Which stages compute what in a step in micro-batches: the same on all ranks.

    `region`: the operators that run for each micro-batch, of one stage each, or of any that needs them.  `home`: the
    stage of each of them.  `moved`: the sums that go from one stage to another, (name, from, to), in order.
    """

    def __init__(self, graph: Graph, region: Region, stages: int) -> None:
        self.graph, self.stages = graph, stages
        self.home = homes(graph.block)
        highest = max(self.home.values(), default=0)
        if highest >= stages:
            raise UsageError(
                f"pipeline: the step has {highest + 1} stages, and the ranks have {stages}: give one cut less "
                "than there are stages on all ranks"
            )
        self.region = self._of_one_stage(region)
        self.values = {v.name: i for i in self.region.members for v in graph.operators[i].writes()}
        every = (graph.operators[i] for i in self.region.members)
        self.borders = [(o, o.op) for o in every if isinstance(o.op, Border)]
        members = set(self.region.members)
        self.outside = [i for i in range(len(graph.operators)) if i not in members]
        self.wanted = {n for n in self.values if graph.read_outside(n, members)}
        for n in self.wanted:  # a sum that any stage could compute is the last one's
            self.home.setdefault(self.values[n], stages - 1)
        self.needs = [self._needs(s) for s in range(stages)]
        sends = [(n, self.home[self.values[n]], s) for s, needs in enumerate(self.needs) for n in needs & self.wanted]
        order = {n: k for k, n in enumerate(self.values)}
        self.moved = sorted((m for m in sends if m[1] != m[2]), key=lambda m: (order[m[0]], m[2]))

    def _of_one_stage(self, region: Region) -> Region:
        """The region without operators that read values of several stages, as sums of a parameter's gradients do:
        they add up what all micro-batches have given."""
        graph, home = self.graph, dict[str, int | None]()
        members, gone = [], set[str]()
        for i in region.members:
            o = graph.operators[i]
            at = {home[v.name] for v in o.reads() if home.get(v.name) is not None}
            if any(v.name in gone for v in o.reads()) or (len(at) > 1 and not isinstance(o.op, Border)):
                gone.update(v.name for v in o.writes())
                continue
            members.append(i)
            home.update((v.name, self.home.get(i)) for v in o.writes())
        return dataclasses.replace(region, members=tuple(members))

    def _needs(self, stage: int) -> set[str]:
        """The values that a stage needs when all micro-batches have run: the step's outputs, the gradients to which it
        contributes, and what they are computed from."""
        of: dict[str, set[int]] = {n: {self.home[self.values[n]]} for n in self.wanted}
        names = set(self.graph.block.outputs)
        for i in self.outside:
            o = self.graph.operators[i]
            stages = set[int]().union(*(of.get(v.name, set()) for v in o.reads()))
            of.update((v.name, stages) for v in o.writes() if not o.op.updates)
        names.update(n for n in self.graph.outputs if stage in of.get(n, ()))
        for i in reversed(self.outside):
            o = self.graph.operators[i]
            if any(v.name in names for v in o.writes()):
                names.update(v.name for v in o.reads())
        return names

    def members(self, stage: int) -> list[int]:
        """The operators of a stage for each micro-batch, in order: its own, and those of no stage that it needs."""
        positions = {i for i in self.region.members if self.home.get(i) == stage}
        read: set[str] = set()
        for i in reversed(self.region.members):
            o = self.graph.operators[i]
            if i in positions or (i not in self.home and any(v.name in read for v in o.writes())):
                positions.add(i)
                if not isinstance(o.op, Border):
                    read.update(v.name for v in o.reads())
        return sorted(positions)

    def slots(self, stage: int, apart: bool) -> dict[str, list[int]]:
        """The operators of a stage by kind of slot.  `apart`: what no earlier stage waits for has slots of its own."""
        operators, members = self.graph.operators, self.members(stage)
        forward = [i for i in members if operators[i].role in FORWARD_ROLES]
        backward = [i for i in members if operators[i].role not in FORWARD_ROLES]
        if not apart:
            return {FORWARD: forward, BACKWARD: backward}
        read = {next(o.reads()).name for o in self.leaving(stage, BACKWARD)}
        first: set[int] = set()
        for i in reversed(backward if read else ()):
            if any(v.name in read for v in operators[i].writes()):
                first.add(i)
                read.update(v.name for v in operators[i].reads())
        if not first:  # nobody waits for this stage
            return {FORWARD: forward, BACKWARD: backward, WEIGHTS: []}
        rest = [i for i in backward if i not in first]
        return {FORWARD: forward, BACKWARD: sorted(first), WEIGHTS: rest}

    def leaving(self, stage: int, kind: str) -> list[Operator]:
        """The borders over which a stage's values go to others, in a direction."""
        forward = kind == FORWARD
        return [o for o, op in self.borders if op.source == stage and (o.role in FORWARD_ROLES) == forward]


class StagePieces(RankPieces):
    """Emits what one rank of a pipeline runs."""

    def __init__(self, graph: Graph, b: Builder, plan: Stagewise, share: Share, pipe: Pipe) -> None:
        super().__init__(graph, b, plan.region, plan.wanted, share)
        self.plan, self.pipe = plan, pipe
        outside = [
            o
            for i in plan.outside
            if isinstance((o := graph.operators[i]).op, Border)
        ]  # fmt: skip
        if outside:
            raise UsageError(
                f"pipeline: '{next(outside[0].reads()).name}' is read by two stages, and is not cut into micro-"
                "batches: cut the step behind an output of a layer for each sample"
            )
        self.made: dict[int, dict[object, Value]] = {}
        self.done: dict[int, set[int]] = {}
        #: receives that have begun, by operator and micro-batch
        self.asked: dict[tuple[int, int], Value] = {}
        #: by channel: the send that has begun last, without a wait so far
        self.sent: dict[str, tuple[Value, Value]] = {}

    def in_order(self, own: Sequence[tuple[int, int]]) -> None:
        """All slots of the rank, in the order of the schedule."""
        order = self.pipe.slots(len(own))
        apart = any(s.kind == WEIGHTS for s in order)
        parts = {stage: self.plan.slots(stage, apart) for stage in self.pipe.own()}
        asked = 0
        for k, slot in enumerate(order):
            while asked < min(k + 1 + AHEAD, len(order)):
                self.ask(order[asked], own[order[asked].micro_batch], parts[self.stage(order[asked])])
                asked += 1
            self.slot(slot, own[slot.micro_batch], parts[self.stage(slot)])

    def stage(self, slot: Slot) -> int:
        """The stage of a slot."""
        return slot.chunk * self.pipe.ranks + self.pipe.rank

    def ask(self, slot: Slot, at: tuple[int, int], parts: dict[str, list[int]]) -> None:
        """Begins to receive what a slot needs."""
        for i in parts[slot.kind]:
            o = self.block.operators[i]
            if isinstance(o.op, Border) and o.op.source % self.pipe.ranks != self.pipe.rank:
                self.asked[i, slot.micro_batch] = self.begun(o, o.op, at)

    def slot(self, slot: Slot, at: tuple[int, int], parts: dict[str, list[int]]) -> None:
        """One pass of a micro-batch through a stage, and what leaves the stage."""
        stage, micro_batch = self.stage(slot), slot.micro_batch
        cache = self.made.setdefault(micro_batch, {})
        done = self.done.setdefault(micro_batch, set())
        for i in parts[slot.kind]:
            if i in done:
                continue
            done.add(i)
            o = self.block.operators[i]
            if (i, micro_batch) in self.asked:
                name = self.b.names.take(f"{next(o.writes()).name}#{at[0]}")
                cache[next(o.writes()).name] = self.arrived(self.asked.pop((i, micro_batch)), name)
            elif isinstance(o.op, Border):  # from another stage of this rank
                cache[next(o.writes()).name] = cache[next(o.reads()).name]
            else:
                self.b.role = o.role
                self.one(i, self.region, cache, *at)
        for o in self.plan.leaving(stage, slot.kind) if slot.kind != WEIGHTS else ():
            assert isinstance(o.op, Border)
            if o.op.target % self.pipe.ranks != self.pipe.rank:
                self.send(cache[next(o.reads()).name], self.channel(o.op), o.op.target % self.pipe.ranks)

    def begun(self, o: Operator, op: Border, at: tuple[int, int]) -> Value:
        """Begins to receive a micro-batch's part of a value from another stage."""
        (x,) = o.reads()
        state = self.region.states[next(o.writes()).name]
        if not isinstance(state, Cut):
            raise UsageError(f"pipeline: '{x.name}' is a sum over the batch: the step cannot be cut behind it")
        return self.receive(state.place.resized(x.type, at[1]), self.channel(op), op.source % self.pipe.ranks)

    def channel(self, op: Border) -> str:
        """The channel of a border."""
        return f"{self.pipe.axis}.{op.source}.{op.target}"

    def send(self, x: Value, channel: str, peer: int) -> None:
        """Begins to send; what was sent before on this channel has left."""
        self.sent_wholly(channel)
        self.b.role = Role.COMMUNICATE
        op = Send(self.pipe.axis, self.pipe.ranks, self.numbers.take(channel), channel, peer=peer)
        self.sent[channel] = self.b.emit(op, x), x

    def sent_wholly(self, channel: str) -> None:
        """Waits for the last send on a channel."""
        if channel in self.sent:
            self.b.role = Role.COMMUNICATE
            self.b.CommWait(*self.sent.pop(channel))

    def receive(self, t: TensorType, channel: str, peer: int) -> Value:
        """Begins to receive a value of a type from another rank."""
        self.b.role = Role.COMMUNICATE
        number = self.numbers.take(channel)
        op = Recv(self.pipe.axis, self.pipe.ranks, number, channel, peer=peer, shape=t.shape, dtype=t.dtype)
        return self.b.emit(op)

    def arrived(self, target: Value, name: str) -> Value:
        """A received value, after the wait for it, under a name."""
        self.b.role = Role.COMMUNICATE
        value = self.b.CommWait(target)
        self.b.operators[-1] = self.b.operators[-1].renamed({value.name: name})
        return Value(name, value.type)

    def finished(self, mark: int) -> list[Operator]:
        """The operators since `mark`, sums, and the exchange of sums between stages."""
        operators = super().finished(mark)
        stages = {*self.pipe.own()}
        values = {v.name: v for v in self.region.written(self.block).values()}
        moved = [(n, a % self.pipe.ranks, b % self.pipe.ranks) for n, a, b in self.plan.moved]
        start = len(self.b.operators)
        here = self.pipe.rank
        for name, a, b in dict.fromkeys(m for m in moved if m[1] != m[2]):
            channel = f"{self.pipe.axis}.sums.{a}.{b}"
            if a == here:
                self.send(self.whole_on_rank(values[name]), channel, b)
        for name, a, b in dict.fromkeys(m for m in moved if m[1] != m[2]):
            if b == here and not any(self.plan.home[self.plan.values[name]] == s for s in stages):
                channel = f"{self.pipe.axis}.sums.{a}.{b}"
                self.arrived(self.receive(self.whole_on_rank(values[name]).type, channel, a), name)
        for channel in list(self.sent):
            self.sent_wholly(channel)
        exchanged = self.b.operators[start:]
        del self.b.operators[start:]
        return [*operators, *exchanged]

    def whole_on_rank(self, v: Value) -> Value:
        """A value of all micro-batches, as a rank has it: its own rows of one that is cut."""
        state = self.region.states.get(v.name)
        return v if not isinstance(state, Cut) else Value(v.name, state.place.resized(v.type, self.size))

    def of_others(self) -> set[str]:
        """Results of operators of other stages, or of none, that run once, such as gathered parts of a parameter."""
        stages, home = {*self.pipe.own()}, self.plan.home
        foreign = (i for i in self.plan.outside if home.get(i) not in stages)
        return {v.name for i in foreign for v in self.graph.operators[i].writes()}

    def own_part(self, block: Block) -> Block:
        """The block without operators and parameters that this rank does not need; buffers that no stage needs stay, so
        that the stages have together what one rank has."""
        needs = set[str]().union(*(self.plan.needs[s] for s in self.pipe.own()))
        names = {v.name for v in block.declared()}
        operators: list[Operator] = []
        for o in prune(_without_unread(block.operators, self.of_others(), needs), needs):
            if all(v.name in names for v in o.reads()):
                operators.append(o)
                names.update(v.name for v in o.writes())
            elif any(v.name in needs for v in o.writes()):
                missing = next(v.name for v in o.reads() if v.name not in names)
                raise UsageError(f"pipeline: '{missing}' is read by stages {list(self.pipe.own())}, but is not there")
        operators = prune(operators, needs)
        read = {v.name for o in operators for v in (*o.reads(), *o.writes())} | set(block.outputs)
        others = {v.name for o in self.block.operators for v in (*o.reads(), *o.writes())} - read
        return dataclasses.replace(
            block,
            parameters=tuple(v for v in block.parameters if v.name in read),
            buffers=tuple(v for v in block.buffers if v.name not in others),
            constants=tuple(c for c in block.constants if c.value.name in read),
            operators=tuple(operators),
        )


def _without_unread(operators: Sequence[Operator], loose: set[str], needs: set[str]) -> list[Operator]:
    """The operators without communication that makes values of `loose` which nothing here reads."""
    read, kept = set(needs), []
    for o in reversed(operators):
        if all(v.name in loose for v in o.writes()) and not any(v.name in read for v in o.writes()):
            continue
        kept.append(o)
        read.update(v.name for v in o.reads())
    return kept[::-1]
