"""PPO and A3C as loops written by hand over the same workers and learner, to compare plans with.

They make the same calls as the plans: what workers compute, what is sent and what is learned is the same, bit
for bit where the order is fixed. There is no flow: nothing is counted, timed or saved on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from rollstream.engine import Actor, Future
from rollstream.flow import Context
from rollstream.rl.batch import Batch
from rollstream.rl.episode_statistics import ended_episodes
from rollstream.rl.operators import StandardizeFields
from rollstream.rl.reporting import EPISODE_WINDOW
from rollstream.rl.worker import RolloutWorker
from rollstream.rl.worker_set import WorkerSet

Returns = deque[Any]
"""Returns, lengths and successes of the last episodes: what a loop reports."""


def sampled(worker: RolloutWorker) -> Batch:
    """On a worker: a batch. The context, which a flow would look into, is thrown away."""
    return worker.sample(Context("loop", ("worker", "loop", 0), worker, {}))


def gradients(worker: RolloutWorker) -> tuple[Any, Any, Any, int]:
    """On a worker: the gradient of a batch, its metrics, its episodes and its steps."""
    batch = sampled(worker)
    return (*worker.compute_gradients(batch), ended_episodes(batch), batch.steps)


def ppo(workers: WorkerSet) -> Iterator[Returns]:
    """Sample everywhere, join, standardize, train, publish; gives the last episodes after each update."""
    engine, learner = workers.engine, workers.local_learner
    standardize = StandardizeFields(["advantage"])
    window: Returns = deque(maxlen=EPISODE_WINDOW)
    while True:
        batches = engine.results([actor.apply(sampled) for actor in workers.actors])
        batch = standardize(Batch.concatenate(batches))
        learner.train(batch.validated())
        workers.send_weights()
        window.extend(ended_episodes(batch).tolist())
        yield window


def a3c(workers: WorkerSet, every: int) -> Iterator[Returns]:
    """Gradients as they come: apply, send the weights back, ask again; gives the last episodes at times."""
    engine, learner = workers.engine, workers.local_learner
    window: Returns = deque(maxlen=EPISODE_WINDOW)
    waiting: dict[Future[Any], Actor[Any]] = {}
    idle = workers.actors
    while True:
        for _ in range(every):
            waiting |= {actor.apply(gradients): actor for actor in idle}
            done, _ = engine.wait(list(waiting))
            idle = [waiting.pop(done[0])]
            grads, metrics, ended, steps = done[0].result()
            learner.apply_gradients(grads, metrics, steps)
            workers.send_weights(idle)
            window.extend(ended.tolist())
        yield window
