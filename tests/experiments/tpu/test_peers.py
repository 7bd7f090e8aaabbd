"""Peers: the result is of the pinned versions, and tiles are counted as complete."""

import pytest

from experiments.lab.results import load
from experiments.tpu import cases_peers, peers

LOOP = """\
   0x0 LB: > {{ %s2 = smov 0 }} /* Start region 9 */
   0x1   : > {{ %p3 = scmp.le.s32.totalorder %s4, 0 }}
   0x2   : > {{ %1 = sbr.rel (%p3) target = $region3 }}
{}   0x20  : > {{ %v3 = vadd.f32 %v1, %v2 }} /* Start region 3 */
   0x21  : > {{ %p1 = scmp.ge.s32.totalorder %s3, %s4 /* loop exit test */ }}
   0x22  : > {{ %5 = sbr.rel (!%p1) target = $region9 }}
"""


def test_the_result_is_of_the_pinned_versions_and_programs():
    result = load("tpu/peers")
    assert result["config"]["pins"] == peers.PINS | peers.ALONE
    assert {*result["cases"]} == {*cases_peers.table()}


@pytest.mark.parametrize(("peer", "of_branch"), [("flywheel-tpu", 6), ("tokamax", 0)])
def test_a_complete_tile_passes_over_the_branch_of_incomplete_ones(
    tmp_path, peer, of_branch
):
    # Four bundles after a branch are always issued.
    text = LOOP.format("".join(f"   0x{i}   : > {{}}\n" for i in range(3, 13)))
    (tmp_path / "17-kernel_per_seq.1-03-final_bundles.txt").write_text(text)
    tokens, _ = peers.TILES[peer]
    found = peers.of_tiles(tmp_path, f"v5e/16/32/{peer}/fused/forward")
    assert found * tokens * 32 == 3 + 10 + 3 - of_branch
