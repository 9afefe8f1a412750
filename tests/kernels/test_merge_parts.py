"""Partial states of a row are joined as one softmax over all of them, however many there are and in any numbering."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the torch backend runs alone")

from radixpool.kernels import AttentionSpec
from radixpool.kernels.launch import (
    FEW_PARTS,
    MANY_PARTS,
    SOME_PARTS,
    DeviceInfo,
    MergeConfig,
    merge_config,
    merge_config_for_any,
)

COUNTS = [0, 1, 3, 8, 9, 16, 17, 64, 70]


@pytest.mark.parametrize("config", [FEW_PARTS, SOME_PARTS, MANY_PARTS, MergeConfig(2, 2, 4)], ids=str)
@pytest.mark.parametrize(("heads", "width", "sinks"), [(7, 80, False), (2, 32, True), (1, 64, False)])
def test_parts_join_to_one_softmax(config, heads, width, sinks, device):
    from radixpool.kernels.triton_backend import Features, merge_variant

    gen = torch.Generator().manual_seed(len(COUNTS) * heads)
    spec = AttentionSpec(
        num_q_heads=heads, num_kv_heads=1, head_dim=width, block_size=16, device=device, backend="triton"
    )
    total = sum(COUNTS)
    number = torch.randperm(total, generator=gen).to(torch.int32)
    part = torch.randn(total, heads, width, generator=gen)
    part_lse = torch.randn(total, heads, generator=gen) * 20
    part_lse[torch.rand(total, heads, generator=gen) < 0.2] = -math.inf
    sink = torch.randn(heads, generator=gen) * 5
    starts = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0), total], dtype=torch.int32)
    rows = torch.randperm(len(COUNTS) + 2, generator=gen)[: len(COUNTS) + 1].to(torch.int32)
    out = torch.full((len(COUNTS) + 2, heads, width), math.nan, device=device)
    lse = torch.full((len(COUNTS) + 2, heads), math.nan, device=device)
    variant = merge_variant(spec, config, Features(sinks=sinks, lse=True), chained=False)
    programs = -(-heads // variant.constants["HEADS"])
    tensors = (sink, part, part_lse, rows, starts, number, torch.tensor([len(COUNTS)], dtype=torch.int32))
    variant.launch((len(COUNTS) + 1, programs, 1), (out, lse, *(t.to(device) for t in tensors)))

    natural = part_lse.double() * math.log(2)
    for i, row in enumerate(rows[:-1].tolist()):
        mine = number[int(starts[i]) : int(starts[i + 1])].long()
        logits = torch.cat([natural[mine], sink.double()[None]]) if sinks else natural[mine]
        want_lse = logits.logsumexp(0) if len(logits) else torch.full((heads,), -math.inf, dtype=torch.float64)
        weights = (natural[mine] - torch.where(want_lse.isinf(), 0.0, want_lse)).exp()
        torch.testing.assert_close(out[row].cpu().double(), (weights[..., None] * part[mine]).sum(0), atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[row].cpu().double(), want_lse, atol=1e-4, rtol=0)
    untouched = sorted(set(range(len(COUNTS) + 2)) - set(rows[:-1].tolist()))
    assert out[untouched].isnan().all() and lse[untouched].isnan().all()


def test_the_choice_follows_the_parts_of_a_row():
    assert [merge_config(n) for n in (0, 8, 8.1, 16, 16.5)] == [
        FEW_PARTS, FEW_PARTS, SOME_PARTS, SOME_PARTS, MANY_PARTS,
    ]  # fmt: skip


def test_a_plan_for_any_batch_expects_the_cut_of_its_largest():
    device = DeviceInfo(arch=90, num_sms=132, pdl=True)
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=128, block_size=16)
    assert merge_config_for_any(1, spec, device) == MANY_PARTS
    assert merge_config_for_any(64, spec, device) == SOME_PARTS
