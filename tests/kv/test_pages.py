"""The KV cache's memory: where layers begin, and pages that are ready before they are written."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep

import pytest

torch = pytest.importorskip("torch")

from headrace.core.kv.pages import PAGE  # noqa: E402
from headrace.core.kv.store import KVStore  # noqa: E402

SHAPE = {"num_layers": 30, "num_kv_heads": 3, "block_size": 16, "head_dim": 64, "dtype": torch.float16}
BLOCK = 12_288 * 30
"""Bytes of a block in all layers."""


def test_no_block_reaches_a_new_page_in_many_layers() -> None:
    store = KVStore(num_blocks=600, **SHAPE)
    pages = [
        {(store.pool[block, layer].data_ptr() + 12_287) // PAGE for layer in range(30)}
        for block in range(store.pool.shape[0])
    ]
    assert max(len(after - before) for before, after in pairwise(pages)) == 1


def test_layers_lie_apart_and_hold_what_is_written() -> None:
    store = KVStore(num_blocks=600, **SHAPE)
    for layer in range(30):
        store.layer(layer)[:] = layer + 1
    assert all(bool((store.layer(layer) == layer + 1).all()) for layer in range(30))
    store.copy([(5, 7)])
    assert torch.equal(store.pool[5], store.pool[7])


def test_a_small_cache_lies_close_together_and_needs_no_thread() -> None:
    store = KVStore(num_blocks=4, num_layers=2, num_kv_heads=2, block_size=16, head_dim=16)
    assert store.pool.stride(1) == 4 * 2 * 2 * 16 * 16
    assert store.ahead(100) is None


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")
def test_memory_is_ready_before_it_is_written_and_no_further() -> None:
    store = KVStore(num_blocks=6000, **SHAPE)
    before = resident_bytes()
    ahead = store.ahead(2048)
    assert ahead is not None
    ahead.make_ready(100)
    assert ahead.num_ready == 100
    assert resident_bytes() >= before + 100 * BLOCK - 31 * PAGE
    ahead.reach(400)  # 128 blocks further on.
    grows_to(before + 528 * BLOCK)
    while ahead.num_ready < 528:
        sleep(0.01)
    ahead.close()
    assert resident_bytes() - before <= 528 * BLOCK + 31 * PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="pages are made ready on Linux only")
def test_making_ready_takes_a_small_share_while_steps_run_and_hurries_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = KVStore(num_blocks=6000, **SHAPE).ahead(2048)
    assert ahead is not None
    now = 100.0
    monkeypatch.setattr("headrace.core.kv.pages.monotonic", lambda: now)
    ahead.make_ready(200)
    ahead.reach(10)
    ahead.close()
    assert ahead._rest_s(0.005) == pytest.approx(0.155)
    assert ahead._rest_s(0.0001) == 0.005
    ahead.reach(300)
    assert ahead._rest_s(0.005) == pytest.approx(0.035)
    now += 1.0
    assert ahead._rest_s(0.005) == 0.0


def grows_to(num_bytes: int) -> None:
    until = monotonic() + 60
    while resident_bytes() < num_bytes - 31 * PAGE and monotonic() < until:  # Pages that were there before.
        sleep(0.01)
    assert resident_bytes() >= num_bytes - 31 * PAGE


def resident_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
