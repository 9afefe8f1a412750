"""The second launch of a bound kernel passes what the first did, with addresses in place of tensors."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the torch backend runs alone")

from radixpool.kernels import variant as module
from radixpool.kernels.variant import KernelVariant, Launch, specialisation


class Recorder:
    """Stands for a kernel that Triton compiled: remembers how it was launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("bound", grid, arguments))

    def run(self, x, y, z, stream, function, metadata, launch, enter, leave, *arguments):
        assert (function, metadata, launch, enter, leave) == ("function", "metadata", None, None, None)
        self.calls.append((stream, (x, y, z), arguments))


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(KernelVariant, "kernel_for", lambda self, arguments, kind: recorder)
    return recorder


@pytest.fixture
def launch():
    function = SimpleNamespace(arg_names=["X", "Y", "factor", "PART", "stride", "WIDTH"])
    return Launch(KernelVariant(function, {"WIDTH": 16}, {}), (2, 3, 1), (torch.zeros(4),), (7,))


def test_addresses_stand_where_tensors_stood(recorder, launch):
    part = launch.fixed[0]
    tensors, others = ((torch.ones(2), torch.ones(3)) for _ in range(2))
    launch.first(tensors, (0.5,), "kind")
    launch.again([t.data_ptr() for t in others], (0.25,), 99)
    (_, grid, first), (stream, grid_again, again) = recorder.calls
    assert grid == grid_again == (2, 3, 1) and stream == 99
    assert first == (*tensors, 0.5, part, 7, 16)
    assert again == (*(t.data_ptr() for t in others), 0.25, part.data_ptr(), 7, 16)


def test_a_profiler_that_listens_sees_every_launch(recorder, launch, monkeypatch):
    launch.first((torch.ones(2), torch.ones(3)), (0.5,), "kind")
    hook = SimpleNamespace(calls=[print])
    monkeypatch.setattr(module.knobs.runtime, "launch_enter_hook", hook)
    launch.again([1, 2], (0.5,), 99)
    assert [call[0] for call in recorder.calls] == ["bound", "bound"]


def test_numbers_that_triton_compiles_for_differently_are_told_apart():
    """1 becomes a constant of the code, multiples of 16 are known as such, the others are neither."""
    one, sixteen, five = (hash(specialisation(n)) for n in (1, 16, 5))
    assert len({one, sixteen, five}) == 3
    assert specialisation(0) == specialisation(16) and specialisation(5) == specialisation(7)
