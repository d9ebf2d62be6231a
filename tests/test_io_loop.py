"""Whoever waits serves the sockets, or the standby thread does: at no moment nobody."""

from typing import Any

from rollstream.engine.io_loop import IOLoop


def test_the_standby_thread_is_not_woken_while_it_would_give_way() -> None:
    """A thread that gives up waiting for its turn first takes back that it wants one.

    Else the standby thread wakes up, sees that somebody wants the turn, and sleeps again: nobody serves.
    """
    loop = IOLoop(lambda: None, lambda: None, lambda error: None)
    wanted: list[bool] = []
    timer: Any = loop._timer
    assert timer is not None
    wake_up = timer.set

    def record(*, at_once: bool = False) -> None:
        if at_once:
            wanted.append(loop._wanted)
        wake_up(at_once=at_once)

    timer.set = record
    with loop._turn:  # as if the standby thread served, and took its time to give way
        loop._standing_in = True
        assert not loop._take_turn()
        loop._standing_in = False
    assert wanted == [False]
    timer.set = wake_up
    loop.close()
