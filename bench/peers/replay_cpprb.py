"""cpprb's replay buffers."""

from __future__ import annotations

from typing import Any

import cpprb  # pyright: ignore[reportMissingImports]
import numpy as np
import replay_workload


class Cpprb(replay_workload.Competitor):
    """Observations with next observations; frames are given stacked, and stored once."""

    def __init__(self, workload: replay_workload.Workload, *, prioritized: bool):
        super().__init__(workload, prioritized=prioritized)
        stacked = workload.stack > 1
        shape = (*workload.shape, workload.stack) if stacked else workload.shape
        observation = {"shape": shape, "dtype": np.dtype(workload.dtype)}
        columns: dict[str, Any] = {
            "obs": observation,
            "act": {"shape": workload.action or 1, "dtype": np.float32 if workload.action else np.int64},
            "rew": {"dtype": np.float32},
            "done": {"dtype": np.bool_},
        }
        options: dict[str, Any] = {"next_of": "obs", "stack_compress": "obs"} if stacked else {}
        if not stacked:
            columns["next_obs"] = observation
        if prioritized:
            self.buffer = cpprb.PrioritizedReplayBuffer(workload.items, columns, alpha=0.6, **options)
        else:
            self.buffer = cpprb.ReplayBuffer(workload.items, columns, **options)

    def block(self, length: int) -> Any:
        columns = self.workload.steps(length)
        flat = {name: column.reshape(-1, *column.shape[2:]) for name, column in columns.items()}
        if self.workload.stack > 1:
            frames = np.concatenate([flat["observation"], flat["next_observation"][-1:]])
            indices = np.maximum(np.arange(len(frames))[:, None] - np.arange(self.workload.stack)[::-1], 0)
            stacked = np.ascontiguousarray(np.moveaxis(frames[indices], 1, -1))
            flat["observation"], flat["next_observation"] = stacked[:-1], stacked[1:]
        return {
            "obs": flat["observation"],
            "act": flat["action"],
            "rew": flat["reward"],
            "next_obs": flat["next_observation"],
            "done": flat["terminated"],
        }

    def insert(self, block: Any) -> None:
        self.buffer.add(**block)

    def sample(self, count: int) -> Any:
        return self.buffer.sample(count, beta=0.4) if self.prioritized else self.buffer.sample(count)

    def update(self, batch: Any, priorities: Any) -> None:
        self.buffer.update_priorities(batch["indexes"], priorities)


if __name__ == "__main__":
    replay_workload.main(Cpprb)
