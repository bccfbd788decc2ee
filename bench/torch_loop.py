"""The peer of row ``peer``: ResNet-18 under PyTorch's DistributedDataParallel over Gloo, as ``scaling_loop`` trains it.

Imports nothing of mxdist, MXNet or torchvision: the network is written out here, layer for layer MXNet's
``resnet18_v1``. Run it without arguments: it starts its two ranks. Rank 0 prints one JSON line: steps, seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import torch
from torch import nn

BATCH, SIDE, RANKS, WARMUP = 16, 64, 2, 8


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.body(x) + self.around(x))


def resnet18(classes: int) -> nn.Sequential:
    """Return the network."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def rank(number: int, steps: int) -> None:
    """Train on this rank."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group("gloo", rank=number, world_size=RANKS)
    torch.manual_seed(0)
    generator = np.random.RandomState(0)
    rows = (WARMUP + steps) * BATCH * RANKS
    x = torch.from_numpy(generator.standard_normal((rows, 3, SIDE, SIDE)).astype(np.float32))[number::RANKS]
    y = (torch.arange(rows) % 10)[number::RANKS]
    net = nn.parallel.DistributedDataParallel(resnet18(10), broadcast_buffers=False)  # as ours: local statistics
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    began = 0.0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            began = time.monotonic()
        part = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad(set_to_none=True)
        loss_of(net(x[part].contiguous()), y[part]).backward()
        optimizer.step()
    seconds = time.monotonic() - began
    if number == 0:
        print(json.dumps({"steps": steps, "seconds": seconds}), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Start the ranks, each on a core of its own, or be one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        return rank(options.rank, options.steps)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    cores = sorted(os.sched_getaffinity(0))
    running = []
    for number in range(RANKS):
        pinned = ["taskset", "-c", str(cores[number % len(cores)])]
        command = [*pinned, sys.executable, __file__, "--steps", str(options.steps), "--rank", str(number)]
        running.append(subprocess.Popen(command, env={**os.environ, **own}))
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


if __name__ == "__main__":
    main()
