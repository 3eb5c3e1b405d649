"""The ancestor, as small as it can be: a server and ten nodes, all threads of one process, as it was measured. A node
asks for a batch, computes its gradient, sends that back; nothing is done with it. Six stages, as its documents tell.

It unpickles what comes over the socket, as the ancestor did: for a benchmark that talks to itself, and nowhere else.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lz4.block
import numpy as np
import torch
from torch import nn

from benchmarks import seed_job

LENGTH = struct.Struct(">IB")  # of what follows, and whether it is compressed


@dataclass(frozen=True)
class Stage:
    """How messages look, and what the sockets are told."""

    name: str
    buffer_nbytes: int
    chunk_nbytes: int = 0  # at most, in one read
    compress: Callable[[bytes, bool], bytes | None] = lambda data, is_gradient: None
    expand: Callable[[bytes], bytes] = zlib.decompress
    in_one_call: bool = True
    nodelay: bool = True
    quickack: bool = False
    direct: bool = False  # tensors as their bytes, not pickled


def _zlib(data: bytes, is_gradient: bool) -> bytes:
    return zlib.compress(data, 1 if is_gradient else 9)


def _adaptive(threshold: int) -> Callable[[bytes, bool], bytes | None]:
    def compress(data: bytes, is_gradient: bool) -> bytes | None:
        if is_gradient:
            return zlib.compress(data, 1) if len(data) > threshold else None
        return zlib.compress(data, 9)

    return compress


def _lz4(data: bytes, is_gradient: bool) -> bytes:
    compressed: bytes = lz4.block.compress(data, mode="fast", acceleration=16)
    return compressed


K, M = 1 << 10, 1 << 20
STAGES = (
    Stage("initial", 512 * K, in_one_call=False, nodelay=False),
    Stage("zlib", M, compress=_zlib),
    Stage("adaptive", 8 * M, 256 * K, _adaptive(M), quickack=True),
    Stage("16 MB buffers", 16 * M, M, _adaptive(512 * K), quickack=True),
    Stage("LZ4 block", 16 * M, M, _lz4, lz4.block.decompress, quickack=True),
    Stage("direct tensors", 16 * M, M, _lz4, lz4.block.decompress, quickack=True, direct=True),
)


class Line:
    """One end of a connection, as a stage has it."""

    def __init__(self, sock: socket.socket, stage: Stage) -> None:
        self._sock, self._stage = sock, stage
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, stage.buffer_nbytes)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, stage.nodelay)
        if stage.quickack and hasattr(socket, "TCP_QUICKACK"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def send(self, message: dict[str, Any], is_gradient: bool) -> None:
        data = pickle.dumps(_direct(message) if self._stage.direct else message, protocol=5)
        packed = self._stage.compress(data, is_gradient)
        body = data if packed is None else packed
        head = LENGTH.pack(len(body), packed is not None)
        if self._stage.in_one_call:
            self._sock.sendall(head + body)
        else:
            self._sock.sendall(head)
            self._sock.sendall(body)

    def receive(self) -> dict[str, Any]:
        nbytes, is_packed = LENGTH.unpack(self._read(LENGTH.size))
        body = self._read(nbytes)
        message: dict[str, Any] = pickle.loads(self._stage.expand(body) if is_packed else body)
        return _tensors(message) if self._stage.direct else message

    def _read(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view, at = memoryview(data), 0
        while at < nbytes:
            end = at + self._stage.chunk_nbytes if self._stage.chunk_nbytes else nbytes
            received = self._sock.recv_into(view[at : min(end, nbytes)])
            if not received:
                raise ConnectionError("the other end closed")
            at += received
        return bytes(data)


def _direct(message: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {"data": value.detach().contiguous().numpy().tobytes(), "shape": tuple(value.shape), "dtype": value.dtype}
        if isinstance(value, torch.Tensor)
        else value
        for key, value in message.items()
    }


def _tensors(message: dict[str, Any]) -> dict[str, Any]:
    kinds = {torch.float32: np.float32, torch.int64: np.int64}
    return {
        key: torch.from_numpy(np.frombuffer(value["data"], kinds[value["dtype"]]).copy().reshape(value["shape"]))
        if isinstance(value, dict)
        else value
        for key, value in message.items()
    }


def batches_per_s(stage: Stage, nodes: int, seconds: float) -> float:
    """All gradients that the server has received, while all nodes were at it."""
    points, labels = seed_job.labelled_points().tensors
    order = torch.split(torch.randperm(len(points)), 32)
    counts, is_over = [0] * nodes, threading.Event()

    def serve(index: int, sock: socket.socket) -> None:
        line = Line(sock, stage)
        while not is_over.is_set():
            ids = order[counts[index] % len(order)]
            line.send({"x": points[ids], "y": labels[ids]}, is_gradient=False)
            line.receive()
            counts[index] += 1
        sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = []
        for index in range(nodes):
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
            threads += [threading.Thread(target=_compute, args=(theirs, stage))]
            threads += [threading.Thread(target=serve, args=(index, ours))]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    before, began = sum(counts), time.perf_counter()
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - began)
    is_over.set()
    for thread in threads:
        thread.join()
    return rate


def _compute(sock: socket.socket, stage: Stage) -> None:
    line, model, loss = Line(sock, stage), seed_job.model(), nn.CrossEntropyLoss()
    try:
        while True:
            batch = line.receive()
            model.zero_grad()
            value = loss(model(batch["x"]), batch["y"])
            value.backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            line.send({**gradients, "loss": value.item()}, is_gradient=True)
    except ConnectionError:
        sock.close()
