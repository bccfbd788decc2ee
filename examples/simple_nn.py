"""SimpleNN, as a recipe: one hidden layer over the pixels of a digit.

A recipe is the part of a training that is yours. Data, ranks, checkpoints, metrics and export are mxdist's part.
"""

from mxnet.gluon import nn


class SimpleNN(nn.HybridBlock):
    """Two fully connected layers.

    :param hidden: width of the first; the second has one output for each class.
    """

    def __init__(self, hidden, classes):
        super().__init__()
        with self.name_scope():
            self.dense1 = nn.Dense(hidden, activation="relu")
            self.dense2 = nn.Dense(classes)

    def hybrid_forward(self, F, x):
        """Return one score for each class. x: (batch, 1, 28, 28), already scaled to 0..1; Dense flattens it."""
        return self.dense2(self.dense1(x))


def network(params):
    """Return the network. params: `model.params` of the job file, and "classes", learnt from the data."""
    return SimpleNN(params["hidden"], params["classes"])
