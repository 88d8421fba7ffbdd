"""What a network is: steps, stacks, openings and closings."""

from lpnet.nn.conv import ConvStep
from lpnet.nn.dropout import Dropout
from lpnet.nn.ends import Classifier, ConvOpening, DenseOpening, ImageClassifier, Replicate, ZeroExpand
from lpnet.nn.module_step import ModuleStep
from lpnet.nn.spatial import Transfer
from lpnet.nn.stack import LayerStack
from lpnet.nn.steps import DenseStep

__all__ = [
    "Classifier",
    "ConvOpening",
    "ConvStep",
    "DenseOpening",
    "DenseStep",
    "Dropout",
    "ImageClassifier",
    "LayerStack",
    "ModuleStep",
    "Replicate",
    "Transfer",
    "ZeroExpand",
]
