"""What the reports of a training amount to so far, in numbers and words that displays share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rollstream.flow import Statistics
from rollstream.training.progress import RunAbout

_SECONDS = 10.0
"""Over how long the speed is measured."""
_KEPT = 512
"""Returns kept for a small curve; twice as many are thinned out."""
_BARS = "▁▂▃▄▅▆▇█"
_NOT_SHOWN = {"n_updates", "clip_range"}
_SHORT = {
    "loss": "total",
    "approx_kl": "kl",
    "clip_fraction": "clipped",
    "gradient_norm": "gradient",
    "explained_variance": "explained",
    "learning_rate": "rate",
}


class ProgressTracker:
    """The newest report, the returns so far, how fast it goes and how long it will take.

    Times are given, as any clock counts seconds.
    """

    def __init__(self, about: RunAbout):
        self.about = about
        self.steps = about.done
        self.report: Mapping[str, float] = {}
        self.statistics: Statistics | None = None
        self.evaluated: float | None = None
        """The mean return of the newest evaluation."""
        self.rate: float | None = None
        """Environment steps a second, lately."""
        self.returns: list[tuple[int, float]] = []
        """Mean returns, with the steps when they were reached."""
        self._marks: deque[tuple[float, int]] = deque(maxlen=_KEPT)

    def add(self, report: Mapping[str, float], statistics: Statistics, now: float) -> None:
        """One more report."""
        self.report = report
        self.steps = int(report.get("time/total_timesteps", self.steps))
        self.evaluated = report.get("eval/mean_reward", self.evaluated)
        if (value := report.get("rollout/ep_rew_mean")) is not None:
            if len(self.returns) >= 2 * _KEPT:
                self.returns = self.returns[::2]
            self.returns.append((self.steps, value))
        self.beat(self.steps, statistics, now)

    def beat(self, steps: int, statistics: Statistics, now: float) -> None:
        """So many steps, and no report yet."""
        self.steps, self.statistics = steps, statistics
        self._marks.append((now, self.steps))
        while len(self._marks) > 2 and now - self._marks[0][0] > _SECONDS:
            self._marks.popleft()
        seconds, steps = now - self._marks[0][0], self.steps - self._marks[0][1]
        if seconds > 0:
            self.rate = steps / seconds

    @property
    def part(self) -> float:
        """How much of the training is done, 0 to 1."""
        return min(1.0, self.steps / self.about.steps) if self.about.steps else 1.0

    def left(self, now: float) -> float | None:
        """Seconds until the end, if it goes on like this; unknown before the second report."""
        if not self.rate:
            return None
        since = now - self._marks[-1][0]
        return max(0.0, (self.about.steps - self.steps) / self.rate - since)

    def losses(self) -> dict[str, float]:
        """What was minimized, by short names."""
        own = {name: value for name, value in self._trained() if name.endswith("loss")}
        return {_short(name): own[name] for name in sorted(own, key=lambda name: name != "loss")}

    def update(self) -> dict[str, float]:
        """What else is known of the newest updates, by short names."""
        rest = {_short(name): value for name, value in self._trained() if not name.endswith("loss")}
        if self.report.get("weights/staleness"):
            rest["staleness"] = self.report["weights/staleness"]
        return rest

    def _trained(self) -> Iterable[tuple[str, float]]:
        for name, value in self.report.items():
            group, _, own = name.partition("/")
            if group == "train" and own not in _NOT_SHOWN:
                yield own, value


def _short(name: str) -> str:
    return _SHORT.get(name, name.removesuffix("_loss").replace("_", " "))


def headline(about: RunAbout) -> str:
    """What is trained, where and how: one line."""
    workers = about.workers or (0 if about.engine == "inline" else 1)  # elsewhere, somebody has to be
    kind = "worker" if workers == 1 else "workers"
    place = f"{workers} {kind} on {about.engine}" if workers else about.engine
    return f"{about.algorithm} on {about.environment} · {place} · seed {about.seed}"


def sparkline(points: Sequence[tuple[int, float]], width: int) -> str:
    """Values over steps as a row of small bars; nothing for fewer than two.

    >>> sparkline([(0, 1.0), (10, 2.0), (30, 8.0)], 4)
    '▁▂▂█'
    """
    if len(points) < 2 or points[0][0] >= points[-1][0]:
        return ""
    first, last = points[0][0], points[-1][0]
    bins: list[list[float]] = [[] for _ in range(width)]
    for steps, value in points:
        bins[min(width - 1, (steps - first) * width // (last - first))].append(value)
    heights: list[float] = []
    for own in bins:
        heights.append(sum(own) / len(own) if own else heights[-1])
    low, high = min(heights), max(heights)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((height - low) * scale)] for height in heights)


def duration(seconds: float | None) -> str:
    """Seconds as a person reads them.

    >>> duration(7.2), duration(3725), duration(None)
    ('0:07', '1:02:05', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def named(values: Mapping[str, float]) -> str:
    """Numbers by name, in a row."""
    return " · ".join(f"{name} {value:.3g}" for name, value in values.items())
