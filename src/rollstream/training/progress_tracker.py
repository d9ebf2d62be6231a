"""Training progress so far: speed, time left, returns, and their text forms that displays share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rollstream.flow import Statistics
from rollstream.training.progress import RunInfo

_SPEED_WINDOW = 10.0
"""Seconds over which steps per second are averaged."""
_MAX_POINTS = 512
"""Returns kept for the sparkline; at twice as many, every other one is dropped."""
_BARS = "▁▂▃▄▅▆▇█"
_HIDDEN = {"n_updates", "clip_range"}
_SHORT = {
    "loss": "total",
    "approx_kl": "kl",
    "clip_fraction": "clipped",
    "grad_norm": "gradient",
    "explained_variance": "explained",
    "learning_rate": "lr",
}


class ProgressTracker:
    """The newest report, the returns so far, steps per second and the time left.

    Callers pass the time, in seconds of any clock.
    """

    def __init__(self, info: RunInfo):
        self.info = info
        self.steps = info.start_step
        self.report: Mapping[str, float] = {}
        self.statistics: Statistics | None = None
        self.evaluation: float | None = None
        """Mean return of the newest evaluation."""
        self._fps: float | None = None
        self._recent_speed: float | None = None
        """Of the last seconds, for the time left."""
        self.returns: list[tuple[int, float]] = []
        """Environment steps and mean returns."""
        self._times: deque[tuple[float, int]] = deque(maxlen=_MAX_POINTS)

    def add(self, report: Mapping[str, float], statistics: Statistics, now: float) -> None:
        """Add a report."""
        self.report = report
        self.steps = int(report.get("time/total_timesteps", self.steps))
        self.evaluation = report.get("eval/mean_reward", self.evaluation)
        self._fps = report.get("time/fps", self._fps)
        if (value := report.get("rollout/ep_rew_mean")) is not None:
            if len(self.returns) >= 2 * _MAX_POINTS:
                self.returns = self.returns[::2]
            self.returns.append((self.steps, value))
        self.heartbeat(self.steps, statistics, now)

    def heartbeat(self, steps: int, statistics: Statistics, now: float) -> None:
        """Update the steps between two reports."""
        self.steps, self.statistics = steps, statistics
        self._times.append((now, self.steps))
        while len(self._times) > 2 and now - self._times[0][0] > _SPEED_WINDOW:
            self._times.popleft()
        seconds, recent = now - self._times[0][0], self.steps - self._times[0][1]
        if seconds > 0:
            self._recent_speed = recent / seconds

    @property
    def steps_per_second(self) -> float | None:
        """`time/fps` as the metrics have it: since the start or resume."""
        return self._recent_speed if self._fps is None else self._fps

    @property
    def fraction(self) -> float:
        """Fraction of the steps that is done, 0 to 1."""
        return min(1.0, self.steps / self.info.steps) if self.info.steps else 1.0

    def seconds_left(self, now: float) -> float | None:
        """Estimated seconds until the end; `None` before the second report."""
        if not self._recent_speed:
            return None
        since = now - self._times[-1][0]
        return max(0.0, (self.info.steps - self.steps) / self._recent_speed - since)

    def losses(self) -> dict[str, float]:
        """Losses of the newest update, by short names."""
        losses = {name: value for name, value in self._train_metrics() if name.endswith("loss")}
        return {_short(name): losses[name] for name in sorted(losses, key=lambda name: name != "loss")}

    def update(self) -> dict[str, float]:
        """Other metrics of the newest update, by short names."""
        rest = {_short(name): value for name, value in self._train_metrics() if not name.endswith("loss")}
        if self.report.get("weights/staleness"):
            rest["staleness"] = self.report["weights/staleness"]
        return rest

    def _train_metrics(self) -> Iterable[tuple[str, float]]:
        for name, value in self.report.items():
            group, _, metric = name.partition("/")
            if group == "train" and metric not in _HIDDEN:
                yield metric, value


def _short(name: str) -> str:
    return _SHORT.get(name, name.removesuffix("_loss").replace("_", " "))


def headline(info: RunInfo) -> str:
    """One line: algorithm, environment, workers, engine and seed."""
    workers = info.workers or (0 if info.engine == "inline" else 1)  # other engines need one
    kind = "worker" if workers == 1 else "workers"
    place = f"{workers} {kind} on {info.engine}" if workers else info.engine
    return f"{info.algorithm} on {info.environment} · {place} · seed {info.seed}"


def sparkline(points: Sequence[tuple[int, float]], width: int) -> str:
    """Values over steps as a row of small bars; empty for fewer than two points.

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
    for values in bins:
        heights.append(sum(values) / len(values) if values else heights[-1])
    low, high = min(heights), max(heights)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((height - low) * scale)] for height in heights)


def duration(seconds: float | None) -> str:
    """Seconds as minutes and seconds, or hours.

    >>> duration(7.2), duration(3725), duration(None)
    ('0:07', '1:02:05', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def significant(value: float) -> str:
    """A return or length: one decimal, or three significant digits if it is small.

    >>> significant(1234.56), significant(-0.0512), significant(2.345), significant(0.0)
    ('1,234.6', '-0.0512', '2.35', '0.0')
    """
    return f"{value:,.1f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}"


def format_metrics(values: Mapping[str, float]) -> str:
    """Names and values in one line."""
    return " · ".join(f"{name} {value:.3g}" for name, value in values.items())
