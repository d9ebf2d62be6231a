"""Rollstream's replay table, without actors."""

from __future__ import annotations

from typing import Any

import numpy as np
import replay_workload

from rollstream.replay import (
    ArraySpec,
    Field,
    Fifo,
    MinSize,
    Prioritized,
    Table,
    Transitions,
    Uniform,
    Writer,
    importance_weights,
)


class Rollstream(replay_workload.Competitor):
    """Transitions over shared steps; frames are stored once, and stacked when sampled."""

    def __init__(self, workload: replay_workload.Workload, *, prioritized: bool):
        super().__init__(workload, prioritized=prioritized)
        signature = {
            "observation": ArraySpec(workload.shape, np.dtype(workload.dtype)),
            "action": ArraySpec(workload.action, np.float32 if workload.action else np.int64),
            "reward": ArraySpec((), np.float32),
            "terminated": ArraySpec((), np.bool_),
        }
        fields = {
            "observation": Field("observation", stack=workload.stack),
            "action": Field("action"),
            "reward": Field("reward"),
            "terminated": Field("terminated"),
            "next_observation": Field("observation", "next", stack=workload.stack),
        }
        sampler = Prioritized(0.6) if prioritized else Uniform()
        self.table = Table(
            signature,
            fields,
            max_size=workload.items,
            sampler=sampler,
            remover=Fifo(),
            rate_limiter=MinSize(1),
        )
        self.writer = Writer(self.table, Transitions(1))
        self.generator = np.random.default_rng(0)

    def block(self, length: int) -> Any:
        columns = self.workload.steps(length)
        columns["truncated"] = np.zeros_like(columns["terminated"])
        return columns, columns.pop("next_observation")[-1]

    def insert(self, block: Any) -> None:
        self.writer.write(*block)

    def sample(self, count: int) -> Any:
        sample = self.table.sample(count, self.generator)
        if self.prioritized:
            importance_weights(sample.probabilities, beta=0.4)
        return sample

    def update(self, batch: Any, priorities: Any) -> None:
        self.table.update_priorities(batch.keys, priorities)

    def report(self) -> dict[str, float]:
        info = self.table.info()
        distinct = info.size * self.workload.step_bytes
        return {"row_bytes": info.row_bytes / distinct, "index_bytes": info.index_bytes / distinct}


if __name__ == "__main__":
    replay_workload.main(Rollstream)
