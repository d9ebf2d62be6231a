"""Env specs: which environment to use, and how to create several of it."""

from __future__ import annotations

import copy
import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal, TypeAlias, cast

import gymnasium
from gymnasium import spaces
from gymnasium.envs import registration

from rollstream.engine import RollstreamError
from rollstream.rl.frame_stack import FrameStack
from rollstream.rl.spaces import require_observation_space
from rollstream.rl.vector import NativeVector, SyncVector, Vector
from rollstream.user_code import file_and_name, load_from_file

Source: TypeAlias = str | Callable[..., gymnasium.Env[Any, Any]]
NATIVE_FROM = 32
"""From this many environments on, native vector environments are used: fewer plain ones are as fast."""
_EXTRAS = {"box2d": "box2d", "Box2D": "box2d", "mujoco": "mujoco", "ale_py": "atari", "envpool": "envpool"}


_ALE_STACK = 4
_ALE_OPTIONS = {"stack_num": 1, "reward_clipping": False}
"""`FrameStack` stacks the frames, so that replay stores each once, and workers clip the rewards, so that
returns are true scores."""


class UnknownEnvironment(RollstreamError):
    """There is no such environment, or a package it needs is not installed."""


@dataclass(frozen=True)
class EnvSpec:
    """Which environment to use; it is created where it is needed.

    `EnvSpec("CartPole-v1")`, `EnvSpec("ALE/Pong-v5")`, `EnvSpec("envpool:Pong-v5")`,
    `EnvSpec("my_module:Mine-v0")` for an id that a module registers, `EnvSpec("my_file.py:MyEnv")` for a
    class or function in a file, or a function that returns an environment.
    """

    source: Source
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`, or of the function."""
    frame_stack: int = 1
    """Number of stacked observations a policy sees; of ALE's vector environments, 1 stands for the
    `stack_num` of their options, 4 by default."""
    vectorization: Literal["auto", "sync", "native"] = "auto"
    """`sync` steps plain environments one after the other; `native` uses the environment's own vector
    version."""
    found: Any = field(default=None, init=False, repr=False, compare=False)
    """What the source refers to; set when the spec is sent to a process where it may be unknown."""

    def __post_init__(self) -> None:
        if self.frame_stack == 1 and self._is_ale:
            object.__setattr__(self, "frame_stack", self.options.get("stack_num", _ALE_STACK))
        if not isinstance(self.frame_stack, int) or self.frame_stack < 1:
            raise UnknownEnvironment(f"frame_stack (stack_num of ALE) is {self.frame_stack!r}; use 1 or more")
        if isinstance(self.source, str) or callable(self.source):
            return
        known = getattr(getattr(self.source, "spec", None), "id", "CartPole-v1")
        raise UnknownEnvironment(
            f"env is of type {type(self.source).__name__}; give a Gymnasium id, or a function that returns "
            f"a new environment per call: env=lambda: gymnasium.make({known!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """With what is registered or in a file here, which the receiving process may not have."""
        found = self._found() if isinstance(self.source, str) and not _is_envpool(self.source) else None
        if isinstance(found, registration.EnvSpec) and str(found.entry_point).startswith("__main__:"):
            found = copy.deepcopy(found)
            found.entry_point = cast(Any, registration.load_env_creator(str(found.entry_point)))
        return {**vars(self), "found": found}

    @property
    def name(self) -> str:
        """Name to display."""
        if not isinstance(self.source, str):
            return getattr(self.source, "__name__", repr(self.source))
        parts = file_and_name(self.source)
        return self.source if parts is None else parts[1]

    @property
    def clips_rewards(self) -> bool:
        """Whether the learner sees the sign of rewards: for ALE, unless its `reward_clipping` is false."""
        return self._is_ale and bool(self.options.get("reward_clipping", True))

    @property
    def _is_ale(self) -> bool:
        """Whether ALE's own vector environments are used."""
        return isinstance(self.source, str) and _is_atari(self.source) and self.vectorization != "sync"

    def make(self, count: int, seed: int | None = None, threads: int | None = None) -> Vector:
        """Create environments.

        Args:
            count: Number of environments.
            seed: For those that ignore seeds at reset, such as EnvPool's.
            threads: Of ALE's and EnvPool's vector environments, unless `num_threads` is among the options.
        """
        pool = {} if threads is None else {"num_threads": min(count, threads)}
        vector = self._vector(count, seed, pool)
        try:
            require_observation_space(vector.observation_space)
            return vector if self.frame_stack == 1 else self._stacked(vector)
        except RollstreamError:
            vector.close()
            raise

    def _stacked(self, vector: Vector) -> Vector:
        space = vector.observation_space
        if not isinstance(space, spaces.Box) or not space.shape:
            raise UnknownEnvironment(
                f"frame_stack={self.frame_stack}: only Box observations can be stacked, and the "
                f"observation space of {self.name} is {space}"
            )
        return FrameStack(vector, self.frame_stack)

    def make_one(self, **options: Any) -> gymnasium.Env[Any, Any]:
        """Create a single plain environment."""
        options, found = {**self.options, **options}, self._found()
        if isinstance(found, registration.EnvSpec):
            return _with_masks(_made(self.name, found, options))
        try:
            made = found(**options)
        except Exception as error:
            raise _not_created(self.name, options, error) from error
        if not isinstance(made, gymnasium.Env):
            raise UnknownEnvironment(
                f"{self.name} returned {type(made).__name__} {made!r}; it must return one new "
                f"gymnasium.Env per call"
            )
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(made, name, None), gymnasium.Space):
                raise UnknownEnvironment(f"{self.name} has no {name}: set self.{name} in its __init__")
        return _with_masks(made)

    def _found(self) -> Any:
        """The registered spec of an id, or a function."""
        if self.found is not None:
            return self.found
        if not isinstance(self.source, str):
            return self.source
        if (parts := file_and_name(self.source)) is not None:
            return load_from_file(*parts, "environment", _makes_environments, UnknownEnvironment)
        return _spec(self.source)

    def _vector(self, count: int, seed: int | None, pool: Mapping[str, int]) -> Vector:
        if _is_envpool(self.source):
            options = {**({} if seed is None else {"seed": seed}), **pool, **self.options}
            return NativeVector(_envpool(self.name.partition(":")[2], count, options))
        if isinstance(found := self._found(), registration.EnvSpec):
            native = found.vector_entry_point is not None
            wanted = self.vectorization == "native" or (
                self.vectorization == "auto" and native and (count >= NATIVE_FROM or self._is_ale)
            )
            if wanted and not native:
                raise UnknownEnvironment(
                    f"{self.name} has no vector environment of its own; leave vectorization at 'auto'"
                )
            if wanted:
                options = {**pool, **self.options, **_ALE_OPTIONS} if self._is_ale else self.options
                return NativeVector(_made_vector(self.name, found, count, options))
        return SyncVector(self.make_one, count)


class _MaskMethod(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports the masks of a method `action_masks()`, as sb3-contrib calls it, in `info`."""

    def reset(self, **options: Any) -> Any:
        observation, info = self.env.reset(**options)
        return observation, info | {"action_mask": self._mask()}

    def step(self, action: Any) -> Any:
        *rest, info = self.env.step(action)
        return *rest, info | {"action_mask": self._mask()}

    def _mask(self) -> Any:
        return self.env.get_wrapper_attr("action_masks")()


def _with_masks(environment: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return _MaskMethod(environment) if environment.has_wrapper_attr("action_masks") else environment


def _is_atari(name: str) -> bool:
    return name.rpartition(":")[2].startswith("ALE/")


def _is_envpool(source: Source) -> bool:
    return isinstance(source, str) and source.startswith("envpool:")


def _makes_environments(value: Any) -> bool:
    return isinstance(value, FunctionType) or (isinstance(value, type) and issubclass(value, gymnasium.Env))


def _spec(name: str) -> registration.EnvSpec:
    _register_atari(name)
    module, _, own = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(own)
    except gymnasium.error.Error:
        known = [spec for spec in gymnasium.registry if not spec.startswith(("phys2d/", "tabular/"))]
        near = [one for one in difflib.get_close_matches(own, known, n=3, cutoff=0.5) if one != own]
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        own_way = f"{module} registers none of that name" if module else "one of your own is my_file.py:MyEnv"
        raise UnknownEnvironment(
            f"there is no environment {own!r}{hint}; {own_way}, or my_module:{own} if my_module registers it"
        ) from None
    except ModuleNotFoundError as error:
        raise _missing(name, error) from None


def _made(name: str, spec: registration.EnvSpec, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    spec = copy.deepcopy(spec)
    spec.order_enforce = False  # SyncVector keeps the order itself; this saves 1 us per step
    try:
        return gymnasium.make(spec, disable_env_checker=True, **options)
    except Exception as error:
        raise _not_created(name, options, error) from error


def _made_vector(name: str, spec: registration.EnvSpec, count: int, options: Mapping[str, Any]) -> Any:
    try:
        return gymnasium.make_vec(spec, count, vectorization_mode="vector_entry_point", **options)
    except Exception as error:
        raise _not_created(name, options, error) from error


def _register_atari(name: str) -> None:
    if _is_atari(name):
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
    try:
        return envpool.make_gymnasium(name, num_envs=count, **options)
    except Exception as error:
        raise _not_created(f"envpool:{name}", options, error) from error


def _not_created(name: str, options: Mapping[str, Any], error: Exception) -> RollstreamError:
    if isinstance(error, RollstreamError):
        return error
    if isinstance(error, (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled)):
        return _missing(name, error)
    if isinstance(error, TypeError) and options:
        return UnknownEnvironment(f"{name} does not take these options ({dict(options)}): {error}")
    return UnknownEnvironment(f"{name} cannot be created: {type(error).__name__}: {error}")


def _missing(name: str, error: Exception) -> UnknownEnvironment:
    text = str(error)
    extra = next((extra for module, extra in _EXTRAS.items() if module in text), None)
    fix = f"pip install 'rollstream[{extra}]'" if extra else "install what it needs"
    return UnknownEnvironment(f"{name} needs a package that is not installed ({text}): {fix}")
