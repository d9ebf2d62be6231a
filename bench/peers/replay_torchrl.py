"""TorchRL's replay buffers."""

from __future__ import annotations

from typing import Any

import replay_workload
import torch  # pyright: ignore[reportMissingImports]
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer  # pyright: ignore[reportMissingImports]
from torchrl.data.replay_buffers.samplers import (  # pyright: ignore[reportMissingImports]
    PrioritizedSampler,
    RandomSampler,
)


class TorchRL(replay_workload.Competitor):
    """Observations with next observations and stacked frames, as usually stored."""

    def __init__(self, workload: replay_workload.Workload, *, prioritized: bool):
        super().__init__(workload, prioritized=prioritized)
        torch.set_num_threads(1)  # as all competitors
        sampler = PrioritizedSampler(workload.items, alpha=0.6, beta=0.4) if prioritized else RandomSampler()
        storage = LazyTensorStorage(workload.items)
        self.buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=32)

    def block(self, length: int) -> Any:
        columns = self.workload.steps(length)
        flat = {n: torch.from_numpy(c.reshape(-1, *c.shape[2:])) for n, c in columns.items()}
        if self.workload.stack > 1:
            for name in ("observation", "next_observation"):
                flat[name] = flat[name][:, None].repeat(1, self.workload.stack, 1, 1)
        return TensorDict(flat, batch_size=[len(flat["reward"])])

    def insert(self, block: Any) -> None:
        self.buffer.extend(block)

    def sample(self, count: int) -> Any:
        return self.buffer.sample(count)

    def update(self, batch: Any, priorities: Any) -> None:
        self.buffer.update_priority(batch["index"], torch.from_numpy(priorities).float())


if __name__ == "__main__":
    replay_workload.main(TorchRL)
