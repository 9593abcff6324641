"""Attention over a forest: every node attends to its path from the root, itself included.

In depth-first order the path of a node is inside any run of nodes that contains it, but for the
path to the run's first node. So the nodes are cut into runs, whose keys are that path and the run
itself, and runs of like size are one call of torch's attention with a mask. Where a trajectory that
begins at a root is long, it is a causal call by itself. Transformer Engine's kernels know no such
mask: there every chain of nodes is a sequence of queries whose keys are its whole path
(`layers.EngineAttention`). On a CPU it is compiled (`cpu.attention`), and needs no runs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragen_mega.data.forest import Forest
from ragen_mega.data.types import move

# Without cuDNN, which torch may prefer on Hopper: it builds a plan for every length, and no two
# trajectories have the same.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
RUN = 32
"""Nodes of a run, at least; the queries that torch's CPU kernel takes at a time."""
PATH_PER_RUN = 8
"""A run is at least 1/8 as long as the path to it, so that keys are gathered 9 times at most."""
WHOLE = {"cpu": 256, "cuda": 1}
"""Nodes from which a trajectory that begins at a root is attended to by itself. On CUDA all are:
its fastest kernel takes no mask.
"""
LIKE = 0.85
"""Keys that a run in a call must have, as a share of the keys of the largest run."""


class QueryRun(NamedTuple):
    """Consecutive nodes `start` to `stop` - 1 and the path to the first node."""

    start: int
    stop: int
    path: np.ndarray
    """Keys of the path."""
    size: int
    """Queries that it is padded to; 0 for a causal call without a path."""


class AttentionCall(NamedTuple):
    """Runs that one call of attention computes."""

    runs: int
    queries: int
    """Number of queries of each run, with padding."""
    keys: int
    """Number of keys of each run, with padding."""
    mask: Tensor | None  # [runs, 1, queries, keys] float32, None: causal


class Schedule(NamedTuple):
    """Order of the attention calls of a forest, on its device."""

    calls: list[AttentionCall]
    queries: Tensor | None
    """Node of every query, call by call; None: they are in order."""
    keys: Tensor | None
    """Number of every key, call by call; None: they are in order."""
    outputs: Tensor | None  # [N] place of each node among the queries


def runs_of(forest: Forest, whole_from: int) -> Iterator[QueryRun]:
    """Cut the nodes into runs, in order; chains of `whole_from` nodes at a root stay whole, and
    padding does, so that it changes nothing for the others.
    """
    padding = forest.num_nodes - forest.padding
    whole = [
        chain.start
        for chain in forest.chains
        if not chain.shared and (chain.length >= whole_from or chain.start >= padding)
    ]
    stops = iter([*whole, forest.num_nodes])
    stop, start = next(stops), 0
    for chain in forest.chains:
        end = chain.start + chain.length
        if chain.start == stop:
            yield QueryRun(start, end, chain.path[:0], 0)
            start, stop = end, next(stops)
        while start < end:
            path = chain.path[: chain.shared + start - chain.start]
            size = max(RUN, -(-len(path) // (PATH_PER_RUN * RUN)) * RUN)
            yield QueryRun(start, min(start + size, stop), path, size)
            start = min(start + size, stop)


def schedule_of(forest: Forest, device: torch.device) -> Schedule:
    """Return the calls that compute the attention of a forest, few and with little padding."""
    runs = sorted(runs_of(forest, WHOLE[device.type]), key=lambda run: (run.size, -len(run.path)))
    groups: list[list[QueryRun]] = []
    for run in runs:
        first = groups[-1][0] if groups else run
        is_like = len(run.path) + run.size >= LIKE * (len(first.path) + first.size)
        if groups and run.size and run.size == first.size and is_like:
            groups[-1].append(run)
        else:
            groups.append([run])
    calls, all_queries, all_keys = [], [], []
    given = sum(forest.received)  # keys of nodes that other ranks compute
    ends = move(torch.from_numpy(np.append(forest.ends, 0)), device)
    for group in groups:
        first = group[0]
        num_queries = first.size or first.stop - first.start
        num_keys = len(first.path) + num_queries
        # a padded query repeats the first, a padded key is the key behind the last, of nobody
        queries = np.empty((len(group), num_queries), np.int64)
        keys = np.full((len(group), num_keys), len(forest.ends))
        for row, run in enumerate(group):
            nodes, depth = np.arange(run.start, run.stop), len(run.path)
            queries[row] = run.start
            queries[row, : len(nodes)] = nodes
            keys[row, :depth] = run.path
            keys[row, depth : depth + len(nodes)] = nodes + given
        all_queries.append(queries)
        all_keys.append(keys)
        mask = None
        if first.size:
            q, k = (move(torch.from_numpy(x), device) for x in (queries, keys))
            q = q[:, :, None] + given
            sees = (k[:, None] <= q) & (q < ends[k][:, None])
            mask = torch.zeros(sees.shape, device=device).masked_fill_(~sees, -torch.inf)
            mask = mask.unsqueeze(1)
        calls.append(AttentionCall(len(group), num_queries, num_keys, mask))
    if not any(run.size for run in runs):
        return Schedule(calls, None, None, None)
    queries, keys = (np.concatenate([x.ravel() for x in xs]) for xs in (all_queries, all_keys))
    outputs = np.empty(forest.num_nodes, np.int64)
    outputs[queries[::-1]] = np.arange(len(queries))[::-1]  # the first query of each node wins
    keys = keys.clip(max=len(forest.ends) - 1)
    return Schedule(
        calls, *(move(torch.from_numpy(x.copy()), device) for x in (queries, keys, outputs))
    )


def is_quadratic(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch would hold all scores if key heads are fewer than query heads: on CUDA
    only its flash kernel takes grouped heads, and that one has neither masks nor float32.
    """
    return query.is_cuda and (mask is not None or query.dtype == torch.float32)


def attend(
    query: Tensor, key: Tensor, value: Tensor, schedule: Schedule, scale: float | None
) -> Tensor:
    """Return the attention of the nodes of a forest: query [N, heads, dim], key and value [M,
    kv_heads, dim] to [N, heads * dim].
    """
    calls = schedule.calls
    if schedule.queries is not None and schedule.keys is not None:
        query = query.index_select(0, schedule.queries)
        key, value = (x.index_select(0, schedule.keys) for x in (key, value))
    # split, because its gradient is one concatenation; with slices each call would get a gradient
    # as long as the whole pack
    num_queries = [call.runs * call.queries for call in calls]
    num_keys = [call.runs * call.keys for call in calls]
    outputs = []
    with sdpa_kernel(_BACKENDS):
        for call, q, k, v in zip(
            calls, query.split(num_queries), key.split(num_keys), value.split(num_keys)
        ):
            q, k, v = (x.unflatten(0, (call.runs, -1)).transpose(1, 2) for x in (q, k, v))
            if is_quadratic(q, call.mask):
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            output = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if call.mask is None else call.mask.to(q.dtype),
                is_causal=call.mask is None,
                scale=scale,
                enable_gqa=k.shape[1] != q.shape[1],
            )
            outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
    output = torch.cat(outputs)
    return output if schedule.outputs is None else output.index_select(0, schedule.outputs)
