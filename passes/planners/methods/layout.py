"""Field offsets in the arrays of the local search's state (`moves.py`).

A search has four arrays, made by `flat.py`:

- x: all whole numbers.  It begins with single numbers (`x[NODES]`) and with the places of lists in x: `x[x[BORN] + v]`
  is the node that writes value v.  A list of rows has the place of each row: row i of `READS_AT` is
  `x[x[x[READS_AT] + i]]` and so on, up to where row i + 1 begins;
- f: what is no whole number;
- alive: bytes at the entry of each slot, and the most within it (its last column is the end); compiled moves also have
  rows of blocks of slots, so that a long life takes as many steps as there are blocks;
- given: for `descend` (node, slot) of reruns.
"""

from __future__ import annotations

# single numbers: what to do, of the problem, of a search, of where it is
(WHAT, NODES, VALUES, ABLE, BUDGET, FIXED, ENOUGH, WORK, AT, LIMIT, DRAWN, STALES, CHANGES, PENDING, BEST_LENGTH) = (
    range(15)
)
# lists of nodes and of values of the problem; `..._AT`: the places of rows
(
    READS_AT, WRITES_AT, OVERWRITES_AT, SERVED_AT, READERS_AT, SCRATCH, REPEATABLE, BORN, STAYS, SIZE, CAN,
) = range(15, 26)  # fmt: skip
# rows of the schedule, each sorted, and how many are in them; the best schedule; the state of Python's random numbers
(RUNS_AT, RUN_COUNT, SLOTS_AT, SLOT_COUNT, BEST, TWISTER) = range(26, 32)
# room for what is worked out on the way
(USE, ENDED, NEXT, DIES_AT, MARK, STALE, USES, CHANGE, SEEN) = range(32, 41)
#: how many numbers there are before the lists
HEAD = 41
# places in f; the costs of nodes, and behind them temperatures
(COST, BEST_COST, NOW, COST_UNIT, BYTES_UNIT, COSTS) = range(6)
# rows of `alive`: of slots, then of blocks of slots (what was added to all of a block; the most within any slot of it)
ENTER, MOST, LIFT, HIGH = range(4)
# what to do
FILL, TURN_ON, TURN_OFF, DESCEND, ANNEAL = range(5)
#: nodes that one move puts in, about
PUT_IN = 12
