from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.executor.driver import KV_TOKENS, MODEL, make_driver
from weft.config.engine import EngineConfig
from weft.config.model import ModelNotFound
from weft.executor.build import load_runner

ROOM = {"kv_tokens": 64, "page_size": 16, "max_rows": 4, "context_length": 32}


def test_the_pool_has_just_the_slots_asked_for_in_the_dtype_of_the_engine():
    driver = make_driver(replace(MODEL, dtype="float32"), dtype="bfloat16")
    pool = driver.runner._attention._pool
    assert (pool.num_slots, len(pool.k), pool.v[1].dtype) == (KV_TOKENS, MODEL.num_layers, torch.bfloat16)
    assert driver.runner._model.embedding.matrix.weight.dtype == torch.bfloat16
    driver.runner.close()


def test_a_model_that_cannot_be_loaded_leaves_no_thread_behind(tmp_path):
    before = threading.active_count()
    with pytest.raises(ModelNotFound, match="no weights"):
        load_runner(EngineConfig(), MODEL, folder=tmp_path, **ROOM)
    assert threading.active_count() == before


def test_the_pool_consists_of_whole_pages():
    with pytest.raises(AssertionError):
        load_runner(EngineConfig(), MODEL, folder=Path(), **{**ROOM, "kv_tokens": 60})
