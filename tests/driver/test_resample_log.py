"""A fault that hits many groups is told once."""

import asyncio

import pytest

from rayrl.driver.resample_log import ResampleLog


@pytest.mark.asyncio
async def test_groups_that_one_fault_hit_are_told_in_one_line() -> None:
    lines: list[str] = []
    log = ResampleLog(lines.append, gather_s=60.0)

    for number in range(5):
        log.add(f"sums/0/{number}", 1 if number else 2, "rollout-0 died: killed\nand more")
    log.add("sums/0/9", 1, "no engine answered")
    log.flush()
    log.flush()

    assert lines == [
        "5 groups are sampled again (sums/0/0 (for the 2. time), sums/0/1, sums/0/2 and 2 more): "
        "rollout-0 died: killed",
        "1 group is sampled again (sums/0/9): no engine answered",
    ]


@pytest.mark.asyncio
async def test_what_was_gathered_is_told_by_itself_after_a_moment() -> None:
    told = asyncio.Event()
    lines: list[str] = []
    log = ResampleLog(lambda line: (lines.append(line), told.set())[0], gather_s=0.0)

    log.add("sums/0/1", 1, "no engine answered")

    await asyncio.wait_for(told.wait(), timeout=30)
    assert lines == ["1 group is sampled again (sums/0/1): no engine answered"]
