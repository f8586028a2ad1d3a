"""Graphs of other papers as problems: node/link JSON, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recompute.errors import UsageError
from recompute.passes.planners import simulate
from recompute.passes.planners.core.adapters import read_problem

LINKED: dict[str, Any] = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "three"},
    "nodes": [
        {"name": "a", "backward": False, "cost_cpu": 3, "cost_ram": 10, "id": 0},
        {"name": "b", "backward": False, "cost_cpu": 2, "cost_ram": 20, "id": 1},
        {"name": "b'", "backward": True, "cost_cpu": 1.5, "cost_ram": 40, "id": 2},
    ],
    "links": [{"source": 0, "target": 1}, {"source": 0, "target": 2}, {"source": 1, "target": 2}],
}


def written(folder: Path, content: object) -> Path:
    path = folder / "graph"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_node_link_json_is_a_problem(tmp_path: Path) -> None:
    p = read_problem(written(tmp_path, LINKED))
    assert [(n.cost, n.reads, n.writes, n.backward, n.repeatable) for n in p.nodes] == [
        (3.0, (), (0,), False, True),
        (2.0, (0,), (1,), False, True),
        (1.5, (0, 1), (2,), True, False),
    ]
    assert p.sizes == (10, 20, 40) and p.values == ("a", "b", "b'") and p.name == "three"
    assert simulate(p, range(3)).peak == 70
    assert read_problem(written(tmp_path, LINKED)) == p
    assert read_problem(written(tmp_path, LINKED), repeat_backward=True).nodes[2].repeatable
    texts = [{k: str(x).lower() if k != "id" else x for k, x in n.items()} for n in LINKED["nodes"]]
    assert read_problem(written(tmp_path, changed(nodes=texts))) == p  # as networkx has them from Graphviz
    p.save(tmp_path / "ours")
    assert read_problem(tmp_path / "ours") == p


def test_random_graphs_with_an_order_of_their_own(tmp_path: Path) -> None:
    graph = {
        "graph": {"order": [2, 0, 1]},
        "nodes": [{"name": i, "out_cost": 8 << i, "param_cost": 0, "duration": i} for i in range(3)],
        "links": [{"0": 2, "1": 0}, {"0": 0, "1": 1}, {"0": 0, "1": 1}],
    }
    p = read_problem(written(tmp_path, graph))
    assert p.values == ("2", "0", "1") and p.sizes == (32, 8, 16)
    assert [n.reads for n in p.nodes] == [(), (0,), (1,)] and all(n.repeatable for n in p.nodes)
    graph["graph"] = {}
    assert read_problem(written(tmp_path, graph)).values == ("2", "0", "1")
    graph["graph"] = {"order": [0, 1, 2]}
    with pytest.raises(UsageError, match="'order' has node 0 before node 2"):
        read_problem(written(tmp_path, graph))


def changed(**fields: Any) -> dict[str, Any]:
    return {**LINKED, **fields}


def node(**fields: Any) -> dict[str, Any]:
    return changed(nodes=[{**LINKED["nodes"][0], **fields}, *LINKED["nodes"][1:]])


BAD = {
    "neither a problem of format": {"nodes": 3},
    "not directed": changed(directed=False),
    r"nodes\[0\] has no 'id'": changed(nodes=[3]),
    "two nodes have the id 1": node(id=1),
    "none of cost_ram, out_cost": changed(nodes=[{"id": 0}]),
    r"links\[0\] lacks 'source'": changed(links=[{"from": 0}]),
    "names 9, which is no node": changed(links=[{"source": 0, "target": 9}]),
    "node 0: bytes must be a number that is not negative, not -1": node(cost_ram=-1),
    "node 0: bytes must be a number that is not negative, not nan": node(cost_ram=float("nan")),
    "the cost must be a number that is not negative, not 'x'": node(cost_cpu="x"),
    "'backward' must be true or false": node(backward=[1]),
    "lies on a cycle": changed(links=[{"source": 0, "target": 1}, {"source": 1, "target": 0}]),
    "does not name each node once": changed(graph={"order": [0, 1, 1]}),
    "not a list of node ids": changed(graph={"order": 3}),
    "is not JSON": "digraph { a -> b }",
    "holds a list, not a JSON object": "[]",
}


@pytest.mark.parametrize("message", BAD)
def test_files_that_are_no_graph(tmp_path: Path, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_problem(written(tmp_path, BAD[message]))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_problem(tmp_path / "none")
