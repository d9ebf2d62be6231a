"""Experience replay as plain data: steps stored once, items over them, selectors and rate limiters.

Everything here is numpy; nothing waits, runs by itself or looks at a clock. The semantics are those of Reverb
(Cassirer et al., 2021, arXiv:2102.04736).
"""

from rollstream.rate_limiter import RateLimiter
from rollstream.replay.errors import InsertRefused, ReplayError, SampleRefused, SignatureError
from rollstream.replay.importance import importance_weights
from rollstream.replay.limiter import MinSize, Queue, SampleToInsertRatio, Stack
from rollstream.replay.selectors import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    Prioritized,
    Ranking,
    Selector,
    Uniform,
)
from rollstream.replay.steps import Column, Signature, Steps, flattened, nested, signature_of
from rollstream.replay.table import Field, Sample, Table, TableInfo
from rollstream.replay.windowing import Cut, Episodes, Sequences, Transitions, Windows
from rollstream.replay.writer import Writer

__all__ = [
    "Column",
    "Cut",
    "Episodes",
    "Field",
    "Fifo",
    "InsertRefused",
    "Lifo",
    "MaxHeap",
    "MinHeap",
    "MinSize",
    "Prioritized",
    "Queue",
    "Ranking",
    "RateLimiter",
    "ReplayError",
    "Sample",
    "SampleRefused",
    "SampleToInsertRatio",
    "Selector",
    "Sequences",
    "Signature",
    "SignatureError",
    "Stack",
    "Steps",
    "Table",
    "TableInfo",
    "Transitions",
    "Uniform",
    "Windows",
    "Writer",
    "flattened",
    "importance_weights",
    "nested",
    "signature_of",
]
