"""Reference LightningModules: timm models, a perceptron, a large embedding, a GPT, SimCLR; BatchNorm to GroupNorm."""

from lightning_ga.models.classifier import Classifier, HashedPatchClassifier, MLPClassifier
from lightning_ga.models.gpt import GPT
from lightning_ga.models.group_norm import to_group_norm
from lightning_ga.models.optimizers import timm_optimizer
from lightning_ga.models.simclr import SimCLR
from lightning_ga.models.timm import TimmClassifier, build_timm

__all__ = [
    "GPT",
    "Classifier",
    "HashedPatchClassifier",
    "MLPClassifier",
    "SimCLR",
    "TimmClassifier",
    "build_timm",
    "timm_optimizer",
    "to_group_norm",
]
