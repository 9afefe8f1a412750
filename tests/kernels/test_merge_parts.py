"""Partial states of a row are joined as one softmax over all of them, however many there are and in any numbering."""

import math
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the torch backend runs alone")

import triton.language as tl

from radixpool.kernels import AttentionSpec, device_merge, device_plan
from radixpool.kernels.device_plan import Workspace, state_width
from radixpool.kernels.launch import (
    FEW_PARTS,
    MANY_PARTS,
    SOME_PARTS,
    DeviceInfo,
    MergeConfig,
    merge_config,
    merge_config_for_any,
    merge_programs,
)
from radixpool.kernels.triton_backend import Features, merge_variant
from radixpool.kernels.variant import Launch

COUNTS = [0, 1, 5, 9, 17, 40]


@dataclass
class States:
    """Partial states of rows with COUNTS parts, numbered at random, and what they join to."""

    heads: int
    width: int
    sinks: bool
    device: str

    def __post_init__(self):
        gen = torch.Generator().manual_seed(len(COUNTS) * self.heads)
        total = sum(COUNTS)
        self.spec = AttentionSpec(
            num_q_heads=self.heads, num_kv_heads=1, head_dim=self.width, block_size=16, device=self.device,
            backend="triton",
        )  # fmt: skip
        self.number = torch.randperm(total, generator=gen).to(torch.int32)
        self.part = torch.randn(total, self.heads, self.width, generator=gen)
        self.part_lse = torch.randn(total, self.heads, generator=gen) * 20
        self.part_lse[torch.rand(total, self.heads, generator=gen) < 0.2] = -math.inf
        self.sink = torch.randn(self.heads, generator=gen) * 5
        self.starts = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0), total], dtype=torch.int32)
        self.rows = torch.randperm(len(COUNTS) + 2, generator=gen)[: len(COUNTS) + 1].to(torch.int32)

    def marked(self, phase):
        """The states as items leave them: padded to whole words of four, each with the phase of the call."""
        padded = torch.nn.functional.pad(self.part, (0, state_width(self.spec) - self.width))
        return [((x.contiguous().view(torch.int32) & -2) | phase).view(torch.float32) for x in (padded, self.part_lse)]

    def merge(self, config, marks, phase):
        """Launch the merge over states of a phase; return output and LSE of all rows."""
        features = Features(sinks=self.sinks, lse=True, watched=config.watched)
        variant = merge_variant(self.spec, config, features, chained=False)
        out = torch.full((len(COUNTS) + 2, self.heads, self.width), math.nan, device=self.device)
        lse = torch.full((len(COUNTS) + 2, self.heads), math.nan, device=self.device)
        count = torch.tensor([len(COUNTS)], dtype=torch.int32)
        tensors = (self.sink, *self.marked(phase), marks, self.rows, self.starts, self.number, count)
        grid = (len(COUNTS) + 1, merge_programs(config, self.heads), 1)
        variant.launch(grid, (out, lse, *(t.to(self.device) for t in tensors)))
        return out.cpu(), lse.cpu()

    def check(self, out, lse):
        natural = self.part_lse.double() * math.log(2)
        for i, row in enumerate(self.rows[:-1].tolist()):
            mine = self.number[int(self.starts[i]) : int(self.starts[i + 1])].long()
            logits = torch.cat([natural[mine], self.sink.double()[None]]) if self.sinks else natural[mine]
            want_lse = logits.logsumexp(0) if len(logits) else torch.full((self.heads,), -math.inf).double()
            weights = (natural[mine] - torch.where(want_lse.isinf(), 0.0, want_lse)).exp()
            want = (weights[..., None] * self.part[mine]).sum(0)
            torch.testing.assert_close(out[row].double(), want, atol=2e-5, rtol=0)
            torch.testing.assert_close(lse[row].double(), want_lse, atol=1e-4, rtol=0)
        untouched = sorted(set(range(len(COUNTS) + 2)) - set(self.rows[:-1].tolist()))
        assert out[untouched].isnan().all() and lse[untouched].isnan().all()


def no_marks(device):
    return torch.zeros(1 + (len(COUNTS) + 1) * 16, dtype=torch.int32, device=device)


@pytest.mark.parametrize("config", [FEW_PARTS, SOME_PARTS, MANY_PARTS, MergeConfig(2, 2, 4, watched=False)], ids=str)
@pytest.mark.parametrize(("heads", "width", "sinks"), [(7, 80, False), (2, 33, True)])
def test_parts_join_to_one_softmax(config, heads, width, sinks, device):
    states = States(heads, width, sinks, device)
    states.check(*states.merge(config, no_marks(device), 1))


def test_the_phase_changes_from_call_to_call_and_never_shows(device):
    """The first call after a new cut has phase 1; what the words held before does not matter then."""
    states, marks = States(3, 32, False, device), no_marks(device)
    results = []
    for phase in (1, 0, 1):
        results.append(states.merge(FEW_PARTS, marks, phase))
        states.check(*results[-1])
        programs = merge_programs(FEW_PARTS, 3) * len(COUNTS)
        assert marks.tolist() == [phase] + [2 | phase] * programs + [0] * (len(marks) - 1 - programs)
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(lse, results[0][1], atol=0, rtol=0, equal_nan=True)


def test_a_state_that_never_comes_makes_its_row_nan(device, monkeypatch):
    """A plan that two streams use at once loses states: its rows are given up after a while, not waited for."""
    if device == "cpu":
        monkeypatch.setattr(device_merge, "PATIENCE", tl.constexpr(3))
    states = States(2, 32, False, device)
    out, _ = states.merge(FEW_PARTS, no_marks(device), 0)
    waiting = [row for row, count in zip(states.rows.tolist(), COUNTS, strict=False) if count]
    assert out[waiting].isnan().all()


def test_calls_and_new_cuts_of_one_plan_follow_one_another(make_batch, programs_per_head):
    """Words of a call, of another kind of call and of another cut are told apart: results keep their bits."""
    programs_per_head(4)
    batch = make_batch(lens=(400, 30))
    plan = batch.plan()
    assert plan.device_plan.watched and plan.device_plan.forest.num_parts > 2
    first, _ = batch.run(plan)
    windowed, _ = batch.run(batch.plan(), window=64)
    for _ in range(2):
        torch.testing.assert_close(batch.run(plan)[0], first, atol=0, rtol=0)
        torch.testing.assert_close(batch.run(plan, window=64)[0], windowed, atol=0, rtol=0)
    assert not plan.update(batch.tables, torch.tensor([200, 20]))
    shorter, _ = batch.run(plan)
    assert not plan.update(batch.tables, torch.tensor([400, 30]))
    torch.testing.assert_close(batch.run(plan)[0], first, atol=0, rtol=0)
    fresh = make_batch(lens=(400, 30))
    fresh_plan = fresh.plan()
    fresh_plan.update(fresh.tables, torch.tensor([200, 20]))
    torch.testing.assert_close(fresh.run(fresh_plan)[0], shorter, atol=0, rtol=0)


@pytest.mark.parametrize("stopped_at", [0, 1])
def test_a_call_that_stops_between_its_launches_begins_the_phases_anew(
    make_batch, programs_per_head, monkeypatch, stopped_at
):
    """Its states have the phase of the next call: a merge that looked at words alone could take them for that one's."""
    programs_per_head(4)
    batch = make_batch(lens=(400, 30))
    plan = batch.plan()
    want, _ = batch.run(plan)
    marks = plan.device_plan.sections["marks"]
    assert marks.any()
    launch, seen = Launch.first, []

    def stop(self, *arguments):
        seen.append(self)
        if len(seen) > stopped_at:
            raise KeyboardInterrupt
        launch(self, *arguments)

    plan.device_plan.bound.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "first", stop)
        with pytest.raises(KeyboardInterrupt):
            batch.run(plan)
    assert not marks.any()
    torch.testing.assert_close(batch.run(plan)[0], want, atol=0, rtol=0)


def test_more_states_than_a_merge_can_count_are_refused():
    """Their offsets have 32 bits: more would be read from the beginning again."""
    spec = AttentionSpec(num_q_heads=64, num_kv_heads=8, head_dim=128, block_size=16, device="meta")
    assert Workspace(spec, 2**19).part.shape == (2**19, 64, 128)
    with pytest.raises(ValueError, match=r"expected at most 524288 partial states .* got 524289"):
        Workspace(spec, 2**19 + 1)


def test_a_batch_of_too_many_states_leaves_the_plan_as_it_was(make_batch, programs_per_head, monkeypatch):
    programs_per_head(4)
    batch = make_batch(lens=(400, 30))
    plan = batch.plan()
    want, _ = batch.run(plan)
    monkeypatch.setattr(device_plan, "MAX_STATE_VALUES", plan.device_plan.workspace.memory.numel())
    programs_per_head(40)
    with pytest.raises(ValueError, match="partial states"):
        plan.update(batch.tables, torch.tensor([399, 29]))
    assert plan.seq_lens.tolist() == [400, 30]
    torch.testing.assert_close(batch.run(plan)[0], want, atol=0, rtol=0)


def test_who_waits_for_words_and_who_for_the_grid(make_batch, programs_per_head):
    programs_per_head(40)
    many = make_batch(heads=(2, 2), lens=(2000,)).plan().device_plan
    assert many.merge == MANY_PARTS and not many.watched
    programs_per_head(2)
    tall = make_batch(heads=(32, 1), lens=(200,) * 4, shared=[([0, 1, 2, 3], 12)]).plan().device_plan
    assert tall.tall and not tall.watched


def test_the_choice_follows_the_parts_of_a_row():
    assert [merge_config(n) for n in (0, 8, 8.1, 16, 16.5)] == [
        FEW_PARTS, FEW_PARTS, SOME_PARTS, SOME_PARTS, MANY_PARTS,
    ]  # fmt: skip


def test_a_plan_for_any_batch_expects_the_cut_of_its_largest():
    device = DeviceInfo(arch=90, num_sms=132, pdl=True)
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=128, block_size=16)
    assert merge_config_for_any(1, spec, device) == MANY_PARTS
    assert merge_config_for_any(64, spec, device) == SOME_PARTS
