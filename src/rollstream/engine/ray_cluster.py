"""The connection of this process to Ray: one for all engines, as Ray has it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray

from rollstream.engine.errors import EngineError

_connecting = threading.Lock()
_users = 0
_ours = False
_folder: str | None = None
"""Holds the files of a Ray that was started here."""


def connect(address: str | None, variables: dict[str, str]) -> None:
    """Join Ray if this process has it; else connect to a cluster, or start one."""
    global _users, _ours
    if address is not None and address.startswith("ray://"):
        raise EngineError(
            f"address={address!r}: Ray's client does not carry actors' messages; run this program on a "
            f"machine of the cluster and give address='auto'"
        )
    with _connecting:
        if not ray.is_initialized():
            _initialise(address, variables)
            _ours = True
        elif address not in (None, "auto", current := ray.get_runtime_context().gcs_address):
            raise EngineError(f"address={address!r}: this process is connected to Ray at {current} already")
        _users += 1


def disconnect() -> None:
    """Let Ray go with the last engine, if an engine brought it."""
    global _users, _ours, _folder
    with _connecting:
        _users -= 1
        if _users == 0 and _ours:
            _ours = False
            ray.shutdown()
            if _folder is not None:
                shutil.rmtree(_folder, ignore_errors=True)
                _folder = None


def ends_with_engines() -> bool:
    """Whether Ray was brought by an engine, and goes with the last."""
    return _ours


def _initialise(address: str | None, variables: dict[str, str]) -> None:
    where = address or os.environ.get("RAY_ADDRESS") or "local"  # a job of a cluster is told where it runs
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)  # a cluster started here passes them on to its workers
    try:
        with forks_of_ray(), _private_if(where == "local") as own:
            ray.init(address=where, log_to_driver=True, logging_level=logging.ERROR, **own)
    except Exception as error:
        raise EngineError(f"address={where!r}: cannot connect to Ray: {error}") from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _private_if(local: bool) -> Iterator[dict[str, Any]]:
    """Options for a Ray that nobody else can reach: it listens on the loopback interface only.

    Ray takes loopback for a mistake where it supports clusters, so it is told that it does not, for now. It
    opens its folder to everybody, hence the one around it.
    """
    global _folder
    if not local:
        yield {}
        return
    _folder = tempfile.mkdtemp(prefix="ray", dir=os.environ.get("RAY_TMPDIR"))
    files = os.path.join(_folder, "r")  # the paths of its sockets must not get long
    with patch("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False):
        yield {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "_temp_dir": files}


@contextmanager
def forks_of_ray() -> Iterator[None]:
    """Without JAX's warning of forks: those of Ray become other programs at once, and leave JAX alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        yield


def accelerator(sharing: int = 1) -> dict[str, float]:
    """What an actor asks for to get a GPU, if one is free: Ray hides them from actors that do not ask.

    If there are fewer GPUs than the `sharing` actors that want one, each gets a part of one.
    """
    if (total := ray.cluster_resources().get("GPU", 0)) < 1:
        return {}
    amount = 1 if total >= sharing else 1 / sharing
    if ray.available_resources().get("GPU", 0) < amount:
        who = "the learner" if sharing == 1 else "the learner or the inference actor"
        warnings.warn(f"all GPUs of the cluster are in use: {who} uses a CPU", stacklevel=2)
        return {}
    return {"num_gpus": amount}
