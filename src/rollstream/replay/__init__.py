"""Experience replay with the semantics of Reverb (Cassirer et al., 2021, arXiv:2102.04736).

Tables, selectors, rate limiters and writers are plain NumPy data structures, without threads or clocks.
`rollstream.replay.buffer` adds batches, and `rollstream.replay.service` puts buffers on actors.
"""

from rollstream.rate_limiter import RateLimiter
from rollstream.replay.errors import InsertRefused, ReplayError, SampleRefused, SignatureError
from rollstream.replay.fields import Field
from rollstream.replay.importance import importance_weights
from rollstream.replay.rate_limiters import MinSize, Queue, SampleToInsertRatio, Stack
from rollstream.replay.sampling import Sample
from rollstream.replay.selectors import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    OrderedSelector,
    Prioritized,
    Selector,
    Uniform,
)
from rollstream.replay.signature import (
    ArraySpec,
    Signature,
    flatten_columns,
    infer_signature,
    unflatten_columns,
)
from rollstream.replay.table import Table
from rollstream.replay.table_info import TableInfo
from rollstream.replay.windowing import Episodes, Sequences, Transitions, Windowing, Windows
from rollstream.replay.writer import Writer

__all__ = [
    "ArraySpec",
    "Episodes",
    "Field",
    "Fifo",
    "InsertRefused",
    "Lifo",
    "MaxHeap",
    "MinHeap",
    "MinSize",
    "OrderedSelector",
    "Prioritized",
    "Queue",
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
    "Table",
    "TableInfo",
    "Transitions",
    "Uniform",
    "Windowing",
    "Windows",
    "Writer",
    "flatten_columns",
    "importance_weights",
    "infer_signature",
    "unflatten_columns",
]
