"""Imitate CUDA graphs without a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraph(TorchDispatchMode):
    """Recording runs no in-place operation, so existing tensors do not change. A replay runs the
    recorded operations on the same memory, without the Python code between them. Both are true of
    a real graph. A real graph also refuses operations that wait for the GPU; this one does not."""

    def __init__(self):
        super().__init__()
        self.recorded = []
        self.replays = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        in_place = operation._schema.is_mutable
        out = args[0] if in_place else operation(*args, **kwargs or {})
        self.recorded.append((operation, args, kwargs or {}, out))
        return out

    def replay(self):
        self.replays += 1
        for operation, args, kwargs, out in self.recorded:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor changed in place
                    old.copy_(new)


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Let `torch.cuda` make fake graphs. Return the list to which each new graph is appended."""
    made = []

    def new_graph() -> FakeGraph:
        made.append(FakeGraph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return made
