"""Learn to tell two clouds of points apart: a plain Horovod script, as one might find it anywhere.

By hand: `horovodrun -np 2 python train_blobs.py --epochs 3`.
"""

import argparse

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np


def blobs(seed: int, rows: int = 512) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Return points around (-1, -1) and (1, 1), and which of the two each belongs to."""
    numbers = np.random.RandomState(seed)
    labels = numbers.randint(0, 2, rows)
    points = numbers.randn(rows, 2) + (2 * labels - 1)[:, None]
    return mx.nd.array(points), mx.nd.array(labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    options = parser.parse_args()

    hvd.init()
    points, labels = blobs(seed=hvd.rank())
    network = mx.gluon.nn.Dense(2)
    network.initialize()
    network(points[:1])  # now the shapes are known, and the weights of rank 0 can be sent to the others
    parameters = network.collect_params()
    hvd.broadcast_parameters(parameters, root_rank=0)
    trainer = hvd.DistributedTrainer(parameters, "sgd", {"learning_rate": options.learning_rate})
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    data = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(points, labels), batch_size=64, shuffle=True)
    for epoch in range(1, options.epochs + 1):
        for some_points, some_labels in data:
            with mx.autograd.record():
                loss = loss_of(network(some_points), some_labels)
            loss.backward()
            trainer.step(len(some_points))
        right = (network(points).argmax(axis=1) == labels).mean().asscalar()
        print(f"epoch {epoch}: {right:.1%} of rank {hvd.rank()}'s points are right", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
