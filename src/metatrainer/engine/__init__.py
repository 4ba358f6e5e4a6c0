"""The embedded multi-adapter engine."""

from metatrainer.engine.decode import Decoder, Sample, SamplingParams
from metatrainer.engine.engine import Engine, SampleRequest, TrainOutput, TrainRow
from metatrainer.engine.lora import AdamParams

__all__ = [
    "AdamParams",
    "Decoder",
    "Engine",
    "Sample",
    "SampleRequest",
    "SamplingParams",
    "TrainOutput",
    "TrainRow",
]
