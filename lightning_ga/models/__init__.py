"""Reference LightningModules: any timm model, a plain multi-layer perceptron; BatchNorm to GroupNorm."""

from lightning_ga.models.classifier import Classifier
from lightning_ga.models.group_norm import to_group_norm
from lightning_ga.models.mlp import MLPClassifier
from lightning_ga.models.timm import TimmClassifier

__all__ = ["Classifier", "MLPClassifier", "TimmClassifier", "to_group_norm"]
