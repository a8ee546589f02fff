"""In place of pytorch-ignite, which hospitals do not have: with it, importing MONAI takes a third longer."""

raise ImportError("not installed here")
