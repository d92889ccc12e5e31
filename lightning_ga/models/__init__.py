"""Reference LightningModules: any timm model, and a plain multi-layer perceptron."""

from lightning_ga.models.classifier import Classifier
from lightning_ga.models.mlp import MLPClassifier
from lightning_ga.models.timm import TimmClassifier

__all__ = ["Classifier", "MLPClassifier", "TimmClassifier"]
