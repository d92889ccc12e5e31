"""Reference LightningModules: any timm model, a perceptron, a large embedding, a small GPT; BatchNorm to GroupNorm."""

from lightning_ga.models.classifier import Classifier
from lightning_ga.models.gpt import GPT
from lightning_ga.models.group_norm import to_group_norm
from lightning_ga.models.hashed_patches import HashedPatchClassifier
from lightning_ga.models.mlp import MLPClassifier
from lightning_ga.models.timm import TimmClassifier, build_timm

__all__ = [
    "GPT",
    "Classifier",
    "HashedPatchClassifier",
    "MLPClassifier",
    "TimmClassifier",
    "build_timm",
    "to_group_norm",
]
