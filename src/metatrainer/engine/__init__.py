"""The embedded engine: many LoRA adapters on one base model, sampled and trained in batches."""

from metatrainer.engine.adam import AdamParams
from metatrainer.engine.decode import Sample, SamplingParams
from metatrainer.engine.engine import Engine, SampleRequest
from metatrainer.engine.packer import Lane, Packer
from metatrainer.engine.updates import TrainOutput, TrainRow, Update

__all__ = [
    "AdamParams",
    "Engine",
    "Lane",
    "Packer",
    "Sample",
    "SampleRequest",
    "SamplingParams",
    "TrainOutput",
    "TrainRow",
    "Update",
]
