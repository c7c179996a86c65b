"""Replace the batch norms of the classification task's network by group norms of four groups."""

from __future__ import annotations

from torch import nn

from fairflare.tasks.classification import ClassificationTask


class Task(ClassificationTask):
    """Build the network with group norms."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(4, child.num_features))
        return model
