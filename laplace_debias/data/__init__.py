"""Where data come from: inputs, the reader, pools, chunks."""

from laplace_debias.data.chunks import Chunk, Chunks, gather, partition
from laplace_debias.data.inputs import Batch, Inputs
from laplace_debias.data.loaders import as_batches
from laplace_debias.data.map_style import MapStyle
from laplace_debias.data.roles import TrainingData

__all__ = [
    "Batch",
    "Chunk",
    "Chunks",
    "Inputs",
    "MapStyle",
    "TrainingData",
    "as_batches",
    "gather",
    "partition",
]
