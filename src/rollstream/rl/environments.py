"""Which environment to learn in, and how to make several of it."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import gymnasium
from gymnasium import spaces

from rollstream.engine import RollstreamError
from rollstream.rl.spaces import require_observations
from rollstream.rl.vector import FrameStack, LeanVector, NativeVector, Vector

Source: TypeAlias = str | Callable[..., gymnasium.Env[Any, Any]]
MANY = 32
"""From so many environments on, a native vector environment is preferred: below, plain ones are as fast."""
_EXTRAS = {"box2d": "box2d", "Box2D": "box2d", "mujoco": "mujoco", "ale_py": "atari", "envpool": "envpool"}


class UnknownEnvironment(RollstreamError):
    """There is no such environment, or what it needs is not installed."""


@dataclass(frozen=True)
class Environment:
    """A recipe for environments, made where they are needed.

    `Environment("CartPole-v1")`, `Environment("ALE/Pong-v5")`, `Environment("envpool:Pong-v5")`, or a
    function that makes one.
    """

    source: Source
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`, or of the function."""
    frame_stack: int = 1
    """How many observations a policy sees at once."""
    vectorization: Literal["auto", "lean", "native"] = "auto"
    """Plain environments one after the other, or a vector environment of its own where there is one."""

    @property
    def name(self) -> str:
        """For people."""
        return (
            self.source
            if isinstance(self.source, str)
            else getattr(self.source, "__name__", repr(self.source))
        )

    def make(self, count: int) -> Vector:
        """So many, side by side."""
        vector = self._vector(count)
        require_observations(vector.observation_space)
        if self.frame_stack > 1:
            if not isinstance(vector.observation_space, spaces.Box) or not vector.observation_space.shape:
                raise UnknownEnvironment(
                    f"frame_stack={self.frame_stack}: only arrays of a Box can be stacked, and those of "
                    f"{self.name} are {vector.observation_space}"
                )
            vector = FrameStack(vector, self.frame_stack)
        return vector

    def one(self, **options: Any) -> gymnasium.Env[Any, Any]:
        """A single plain one, to look at or to film."""
        options = {**self.options, **options}
        if callable(self.source):
            return self.source(**options)
        return _made(self.source, options)

    def _vector(self, count: int) -> Vector:
        if isinstance(self.source, str):
            if self.source.startswith("envpool:"):
                return NativeVector(_envpool(self.source.partition(":")[2], count, self.options))
            native = _spec(self.source).vector_entry_point is not None
            only_native = self.source.startswith("ALE/")
            wanted = self.vectorization == "native" or (
                self.vectorization == "auto" and native and (count >= MANY or only_native)
            )
            if wanted and not native:
                raise UnknownEnvironment(
                    f"{self.source} has no vector environment of its own; leave vectorization at 'auto'"
                )
            if wanted:
                return NativeVector(_made_vector(self.source, count, self.options))
        return LeanVector(partial(self.one), count)


def _spec(name: str) -> Any:
    _register_atari(name)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        known = [spec for spec in gymnasium.registry if not spec.startswith(("phys2d/", "tabular/"))]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UnknownEnvironment(f"there is no environment {name!r}: {error}{hint}") from None
    except ModuleNotFoundError as error:
        raise _missing(name, error) from None


def _made(name: str, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    spec = copy.deepcopy(_spec(name))
    spec.order_enforce = False  # the vector keeps order itself: 1 us a step
    try:
        return gymnasium.make(spec, disable_env_checker=True, **options)
    except (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled) as error:
        raise _missing(name, error) from None
    except TypeError as error:
        raise UnknownEnvironment(f"{name} does not take these options ({dict(options)}): {error}") from None


def _made_vector(name: str, count: int, options: Mapping[str, Any]) -> Any:
    try:
        return gymnasium.make_vec(name, count, vectorization_mode="vector_entry_point", **options)
    except (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled) as error:
        raise _missing(name, error) from None


def _register_atari(name: str) -> None:
    if name.startswith("ALE/"):
        try:
            import ale_py  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise _missing(name, error) from None
        gymnasium.register_envs(ale_py)


def _envpool(name: str, count: int, options: Mapping[str, Any]) -> Any:
    try:
        import envpool  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise _missing(name, error) from None
    return envpool.make_gymnasium(name, num_envs=count, **options)


def _missing(name: str, error: Exception) -> UnknownEnvironment:
    text = str(error)
    extra = next((extra for module, extra in _EXTRAS.items() if module in text), None)
    fix = f"pip install 'rollstream[{extra}]'" if extra else "install what it needs"
    return UnknownEnvironment(f"{name} needs a package that is not installed ({text}): {fix}")
