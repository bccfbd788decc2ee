"""A small CNN for CIFAR-10, as a recipe: its layers, its preprocessing, and a validation split of its own."""

import numpy as np
from mxnet.gluon import nn

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of red, green and blue, over ImageNet


def network(params):
    """Return one convolution, one pooling, one fully connected layer."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, kernel_size=3, activation="relu"), nn.MaxPool2D(pool_size=2), nn.Dense(params["classes"]))
    return net


def data(folder, split, params):
    """Return the rows of a split. CIFAR-10 has no validation split: the last tenth of the training rows becomes it."""
    stored = "test" if split == "test" else "train"
    x, y = np.load(folder / stored / "x.npy"), np.load(folder / stored / "y.npy")
    held_out = len(x) // 10
    rows = {"train": slice(0, len(x) - held_out), "validation": slice(len(x) - held_out, None), "test": slice(None)}
    return x[rows[split]], y[rows[split]]


def preprocess(F, x, params):
    """Scale bytes to 0..1, then normalise each colour. x: (batch, 3, 32, 32).

    It runs where the network runs and is exported with it, so whoever uses the model gives it plain bytes.
    """
    colours = F.split(x / 255, num_outputs=3, axis=1)
    return F.concat(*[(colours[i] - MEAN[i]) / DEVIATION[i] for i in range(3)], dim=1)
