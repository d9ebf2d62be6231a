"""Videos of a trained policy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.rl.env_spec import EnvSpec, UnknownEnvironment
from rollstream.training.validation import require_integers

if TYPE_CHECKING:
    from rollstream.training.inference import TrainedPolicy
    from rollstream.training.run import Run

_DEFAULT_FPS = 30
_FORMATS = (".mp4", ".mkv", ".mov", ".webm", ".avi")
_FIX = "pip install 'rollstream[video]'"


class VideoError(RollstreamError):
    """An environment cannot be rendered, or a package for recording is missing."""


def record_video(run: Run, path: str | Path, *, episodes: int = 1, seed: int = 0) -> list[float]:
    """Record episodes with deterministic actions; return their returns."""
    require_integers(1, episodes=episodes)
    require_integers(0, seed=seed)
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise VideoError(f"{path} is not a video file: use one of {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise VideoError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        from imageio_ffmpeg import write_frames
    except ModuleNotFoundError:
        raise VideoError(f"recording needs imageio-ffmpeg, which is not installed: {_FIX}") from None
    env_spec, returns = run.run_config.task.environment, list[float]()
    partial = path.with_name(f".partial-{path.name}")
    environment = _renderable(env_spec)
    try:
        frames = _frames(environment, run.policy, episodes, seed, returns)
        first = next(frames)
        rate = environment.metadata.get("render_fps") or _DEFAULT_FPS
        size = (first.shape[1], first.shape[0])
        with closing(write_frames(str(partial), size, fps=rate, quality=7, macro_block_size=2)) as writer:
            with warnings.catch_warnings():  # the writer forks and execs ffmpeg
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                writer.send(None)
            for frame in chain([first], frames):
                writer.send(np.ascontiguousarray(frame))
        os.replace(partial, path)
    except gymnasium.error.DependencyNotInstalled as error:
        raise VideoError(f"rendering {env_spec.name} needs another package ({error}): {_FIX}") from None
    except OSError as error:
        raise VideoError(f"{path} cannot be written: {error}") from None
    finally:
        environment.close()
        partial.unlink(missing_ok=True)
    return returns


def _renderable(env_spec: EnvSpec) -> gymnasium.Env[Any, Any]:
    if env_spec.name.startswith(("ALE/", "envpool:")):
        raise VideoError(f"{env_spec.name} is a vector environment only, which cannot be rendered")
    try:
        environment = env_spec.make_one(render_mode="rgb_array")
    except UnknownEnvironment as error:
        raise VideoError(f"{env_spec.name} has no argument render_mode to render with: {error}") from None
    if "rgb_array" not in environment.metadata.get("render_modes", ()):
        environment.close()
        raise VideoError(f"{env_spec.name} cannot be rendered: it has no render mode 'rgb_array'")
    return environment


def _frames(
    environment: gymnasium.Env[Any, Any],
    policy: TrainedPolicy,
    episodes: int,
    seed: int,
    returns: list[float],
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the frames of all episodes, and append each return."""
    for number in range(episodes):
        observation, info = environment.reset(seed=seed + number)
        policy.reset()
        total, over = 0.0, False
        yield _render(environment)
        while not over:
            action = policy.act(observation, action_mask=info.get("action_mask"))
            observation, reward, terminated, truncated, info = environment.step(action)
            total += float(reward)
            over = terminated or truncated
            yield _render(environment)
        returns.append(total)


def _render(environment: gymnasium.Env[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(environment.render(), np.uint8)
