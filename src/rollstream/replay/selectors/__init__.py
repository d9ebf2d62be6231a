"""Selectors decide which item a table samples or removes next, under the names they have in Reverb."""

from rollstream.replay.selectors.base import OrderedSelector, Selector, Slots
from rollstream.replay.selectors.heaps import MaxHeap, MinHeap
from rollstream.replay.selectors.prioritized import Prioritized
from rollstream.replay.selectors.queues import Fifo, Lifo
from rollstream.replay.selectors.uniform import Uniform

__all__ = [
    "Fifo",
    "Lifo",
    "MaxHeap",
    "MinHeap",
    "OrderedSelector",
    "Prioritized",
    "Selector",
    "Slots",
    "Uniform",
]
