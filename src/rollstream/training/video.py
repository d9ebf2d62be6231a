"""A trained policy at work, as a film."""

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

if TYPE_CHECKING:
    from rollstream.training.inference import TrainedPolicy
    from rollstream.training.run import Run

_FRAMES_A_SECOND = 30
_KINDS = (".mp4", ".mkv", ".mov", ".webm", ".avi")
_FIX = "pip install 'rollstream[video]'"


class VideoError(RollstreamError):
    """An environment that cannot be filmed, or something that filming needs is not installed."""


def film(run: Run, path: str | Path, *, episodes: int = 1, seed: int = 0) -> list[float]:
    """Film some episodes with the likeliest actions: the return of each."""
    if episodes < 1:
        raise VideoError(f"episodes={episodes}: there is nothing to film; give 1 or more")
    path = Path(path)
    if path.suffix not in _KINDS:
        raise VideoError(f"{path} cannot be a film: give a name that ends in {', '.join(_KINDS)}")
    if not path.parent.is_dir():
        raise VideoError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        from imageio_ffmpeg import write_frames
    except ModuleNotFoundError:
        raise VideoError(f"filming needs imageio-ffmpeg, which is not installed: {_FIX}") from None
    recipe, returns = run.recipe.task.environment, list[float]()
    partial = path.with_name(f".partial-{path.name}")
    environment = _filmed(recipe)
    try:
        frames = _frames(environment, run.policy, episodes, seed, returns)
        first = next(frames)
        rate = environment.metadata.get("render_fps") or _FRAMES_A_SECOND
        size = (first.shape[1], first.shape[0])
        with closing(write_frames(str(partial), size, fps=rate, quality=7, macro_block_size=2)) as writer:
            with warnings.catch_warnings():  # the writer forks, and is another program at once
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                writer.send(None)
            for frame in chain([first], frames):
                writer.send(np.ascontiguousarray(frame))
        os.replace(partial, path)
    except gymnasium.error.DependencyNotInstalled as error:
        raise VideoError(f"{recipe.name} needs more to be drawn ({error}): {_FIX}") from None
    except OSError as error:
        raise VideoError(f"{path} cannot be written as a film: {error}") from None
    finally:
        environment.close()
        partial.unlink(missing_ok=True)
    return returns


def _filmed(environment: EnvSpec) -> gymnasium.Env[Any, Any]:
    """One that draws itself."""
    if environment.name.startswith(("ALE/", "envpool:")):
        raise VideoError(
            f"{environment.name} exists only as many environments side by side, which cannot be filmed"
        )
    try:
        made = environment.one(render_mode="rgb_array")
    except UnknownEnvironment as error:
        raise VideoError(
            f"{environment.name} takes no render_mode, and so cannot be filmed: {error}"
        ) from None
    if "rgb_array" not in made.metadata.get("render_modes", ()):
        made.close()
        raise VideoError(f"{environment.name} cannot be filmed: it has no render mode 'rgb_array'")
    return made


def _frames(
    environment: gymnasium.Env[Any, Any],
    policy: TrainedPolicy,
    episodes: int,
    seed: int,
    returns: list[float],
) -> Iterator[np.ndarray[Any, Any]]:
    """Pictures of one episode after the other."""
    for number in range(episodes):
        observation, info = environment.reset(seed=seed + number)
        policy.reset()
        total, over = 0.0, False
        yield _drawn(environment)
        while not over:
            action = policy.act(observation, action_mask=info.get("action_mask"))
            observation, reward, terminated, truncated, info = environment.step(action)
            total += float(reward)
            over = terminated or truncated
            yield _drawn(environment)
        returns.append(total)


def _drawn(environment: gymnasium.Env[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(environment.render(), np.uint8)
