"""The constants, enumerations and structures of `program.h` for Python.

Written by `python -m weft.ops.cpp.generate_abi` from the header: edit that.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p
from enum import IntEnum

LORA_ROWS = 12
NUM_OPS = 44
FUSED_COLUMNS = 10
PANEL = 32
IN_STEP = 64
SLAB = 64
COARSE = 256
SHORT_GROUP = 256
LORA_TILE = 16
MAX_EXPERTS = 1024
STATE_LANES = 16
DELTA_FACTORS = 8
SCAN_FACTORS = 2
MAX_CROSS = 4096
CROSS_STEP = 64
MAX_RANKS = 64
RANKS_HEAD_BYTES = 16384
RANKS_LOST_AT = 8192


class OpKind(IntEnum):
    PACK_WEIGHT = 0
    UNPACK_WEIGHT = 1
    EMBED = 2
    NORM = 3
    LINEAR = 4
    ROTARY_STORE = 5
    ATTENTION = 6
    ARGMAX = 7
    MASK = 8
    DRAW = 9
    LOGPROBS = 10
    PENALISE = 11
    EMBED_SUM = 12
    LAYER_NORM = 13
    SCALE_LOGITS = 14
    ROUTE = 15
    EXPERTS = 16
    GATE_ROWS = 17
    CONV = 18
    DELTA = 19
    SCAN = 20
    ADD_VECTORS = 21
    SUM_RANKS = 22
    GATHER_RANKS = 23
    COPY = 24
    MULTIPLY = 25
    NARROW = 26
    SCREENED_HEAD = 27
    COPY_HEAD = 28
    ADD_POSITIONS = 29
    CROSS = 30
    KEEP_ROWS = 31
    TAKE_ROWS = 32
    SPREAD = 33
    SELECTIVE = 34
    LIGHTNING = 35
    LIMIT = 36
    CUT_OFF = 37
    OPEN_STREAMS = 38
    PREDICT_STREAMS = 39
    CORRECT_STREAMS = 40
    CLOSE_STREAMS = 41
    INDEXED = 42
    WRITE_ENCODED = 43


class WeightFormat(IntEnum):
    F32 = 0
    BF16 = 1
    I8 = 2
    I4 = 3
    I16 = 4
    I6 = 5
    I2 = 6
    I3 = 7


class ScaleType(IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2
    COARSE = 3


class ContentType(IntEnum):
    FLOAT = 0
    BF16 = 1
    CODES = 2


class Epilogue(IntEnum):
    STORE = 0
    ADD = 1
    GATED_SILU = 2
    GELU = 3
    GELU_TANH = 4
    RELU = 5
    TANH = 6
    RELU2 = 7
    GATED_GELU_TANH = 8
    ADD_SCALED = 9
    GATED_CLAMPED = 10
    QUICK_GELU = 11
    GATED_GELU = 12


class ExpertScores(IntEnum):
    SOFTMAX = 0
    CHOSEN = 1
    SIGMOID = 2


class KvFormat(IntEnum):
    F32 = 0
    BF16 = 1
    I8 = 2
    I16 = 3


class RankAction(IntEnum):
    SUM = 0
    GATHER = 1


class LoraBlock(ctypes.Structure):
    _fields_ = (
        ("adapter", c_int32),
        ("first", c_int32),
        ("num_rows", c_int32),
    )


class StepArgs(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("rows", c_void_p),
        ("starts", c_void_p),
        ("lens", c_void_p),
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("vectors", c_void_p),
        ("window_slots", c_void_p),
        ("window_table", c_void_p),
        ("state_reads", c_void_p),
        ("state_writes", c_void_p),
        ("num_kept", c_int64),
        ("kept_rows", c_void_p),
        ("kept_lens", c_void_p),
        ("kept_slots", c_void_p),
        ("adapters", c_void_p),
        ("num_lora_blocks", c_int64),
        ("lora_blocks", c_void_p),
        ("lora_rows", c_void_p),
        ("rotation", c_void_p),
        ("vectors_stride", c_int64),
        ("sees_to", c_void_p),
        ("narrowed", c_void_p),
        ("token_indices", c_void_p),
    )


class Op(ctypes.Structure):
    _fields_ = (
        ("kind", c_int64),
        ("args", c_void_p),
    )


class FusedStep(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("num_sampling", c_int64),
        ("numbers", c_void_p),
        ("body", c_void_p),
        ("num_body", c_int64),
        ("head", c_void_p),
        ("num_head", c_int64),
        ("table", c_void_p),
        ("num_rows", c_int64),
        ("table_stride", c_int64),
        ("last_tokens", c_void_p),
        ("columns", c_void_p),
        ("hidden", c_void_p),
        ("hidden_size", c_int64),
        ("last", c_void_p),
        ("chosen", c_void_p),
        ("max_logits", c_void_p),
        ("tokens", c_void_p),
        ("invalid", c_void_p),
        ("num_invalid", c_int64),
        ("window_table", c_void_p),
        ("num_state_slots", c_int64),
        ("num_kept", c_int64),
        ("adapters", c_void_p),
        ("num_lora_blocks", c_int64),
        ("lora_blocks", c_void_p),
        ("lora_rows", c_void_p),
        ("rotation", c_void_p),
        ("head_adapters", c_void_p),
        ("head_num_lora_blocks", c_int64),
        ("head_lora_blocks", c_void_p),
        ("head_lora_rows", c_void_p),
        ("computes_all", c_int64),
    )


class DrawColumns(ctypes.Structure):
    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
    )


class Guesses(ctypes.Structure):
    _fields_ = (
        ("counts", c_void_p),
        ("slots", c_void_p),
        ("all", c_void_p),
        ("step", c_void_p),
        ("numbers", c_void_p),
        ("tokens", c_void_p),
        ("later", c_void_p),
        ("num_later", c_int64),
        ("later_hidden", c_void_p),
        ("carried", c_void_p),
    )


class PackedWeight(ctypes.Structure):
    _fields_ = (
        ("format", c_int64),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("padded_in", c_int64),
        ("group", c_int64),
        ("scale_type", c_int64),
        ("has_mins", c_int64),
        ("offset", c_int64),
        ("has_table", c_int64),
        ("table", c_uint8 * 16),
        ("unit", c_float),
        ("panels", c_void_p),
        ("order", c_void_p),
    )


class PackArgs(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("matrix", c_void_p),
        ("content", c_int64),
        ("num_rows", c_int64),
        ("first_row", c_int64),
        ("interleave", c_int64),
        ("scales", c_void_p),
        ("mins", c_void_p),
        ("coarse", c_void_p),
        ("coarse_mins", c_void_p),
    )


class LoraRows(ctypes.Structure):
    _fields_ = (
        ("rank", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("gain", c_void_p),
    )


class LoraTable(ctypes.Structure):
    _fields_ = (
        ("is_bf16", c_int64),
        ("adapters", c_void_p),
    )


class EmbedArgs(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("out", c_void_p),
        ("scale", c_float),
        ("first", c_int64),
        ("num_rows", c_int64),
        ("lora", c_void_p),
        ("unknown_token", c_int64),
    )


class AddVectorsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("part", c_int64),
    )


class CopyArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_step", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("out_step", c_int64),
        ("num", c_int64),
        ("size", c_int64),
    )


class KeepRowsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("kept", c_void_p),
        ("kept_stride", c_int64),
    )


class TakeRowsArgs(ctypes.Structure):
    _fields_ = (
        ("kept", c_void_p),
        ("kept_stride", c_int64),
        ("carried", c_void_p),
        ("size", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class NarrowArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
    )


class MultiplyArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("by", c_void_p),
        ("by_stride", c_int64),
        ("by_step", c_int64),
        ("size", c_int64),
    )


class NormArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("size", c_int64),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("eps", c_float),
        ("add_scale", c_float),
    )


class PackedLoraPart(ctypes.Structure):
    _fields_ = (
        ("rank", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("gain", c_void_p),
        ("shift", c_void_p),
        ("scale", c_float),
    )


class LoraRange(ctypes.Structure):
    _fields_ = (
        ("first_panel", c_int64),
        ("num_panels", c_int64),
        ("step", c_int64),
    )


class Lora(ctypes.Structure):
    _fields_ = (
        ("num_parts", c_int64),
        ("ranges", c_void_p),
        ("parts", c_void_p),
        ("is_bf16", c_int64),
        ("max_rank", c_int64),
    )


class LinearArgs(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("bias", c_void_p),
        ("epilogue", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("scratch", c_void_p),
        ("scale", c_float),
        ("lora", c_void_p),
        ("may_round", c_int64),
    )


class RouteArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("num_experts", c_int64),
        ("num_chosen", c_int64),
        ("scores", c_int64),
        ("is_normed", c_int64),
        ("scale", c_float),
        ("choice_bias", c_void_p),
        ("expert_scale", c_void_p),
        ("num_groups", c_int64),
        ("num_groups_chosen", c_int64),
        ("counts_one", c_int64),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("offsets", c_void_p),
        ("tokens", c_void_p),
        ("sorted_rows", c_void_p),
    )


class ExpertsArgs(ctypes.Structure):
    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("activation", c_int64),
        ("num_experts", c_int64),
        ("num_chosen", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("offsets", c_void_p),
        ("tokens", c_void_p),
        ("sorted_rows", c_void_p),
        ("inner", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("scale", c_float),
        ("adds", c_int64),
        ("scratch", c_void_p),
        ("lora_gate_up", c_void_p),
        ("lora_down", c_void_p),
        ("lora_is_bf16", c_int64),
        ("lora_rank", c_int64),
        ("lora_inner", c_void_p),
    )


class GateRowsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("in_size", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("columns", c_int64),
    )


class KvCache(ctypes.Structure):
    _fields_ = (
        ("format", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("stride", c_int64),
        ("windowed", c_int64),
    )


class RotaryStoreArgs(ctypes.Structure):
    _fields_ = (
        ("cache", c_void_p),
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("heads", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("rotary_dim", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("side_by_side", c_int64),
        ("q_scale", c_void_p),
        ("q_head_stride", c_int64),
        ("axes", c_void_p),
        ("v_eps", c_float),
        ("values_are_keys", c_int64),
    )


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("cache", c_void_p),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
        ("heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("bidirectional", c_int64),
        ("cap", c_float),
        ("sinks", c_void_p),
        ("head_stride", c_int64),
        ("gate", c_void_p),
        ("may_round", c_int64),
        ("chunked", c_int64),
        ("biases", c_void_p),
        ("bias_stride", c_int64),
        ("sees_no_later", c_int64),
        ("most_keys", c_int64),
    )


class IndexedArgs(ctypes.Structure):
    _fields_ = (
        ("cache", c_void_p),
        ("index", c_void_p),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("index_q", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("heads", c_int64),
        ("index_heads", c_int64),
        ("num_chosen", c_int64),
        ("scale", c_float),
        ("chosen", c_void_p),
    )


class ConvArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("in_gate", c_void_p),
        ("out_gate", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("channels", c_int64),
        ("taps", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("has_silu", c_int64),
        ("states", c_void_p),
        ("state_stride", c_int64),
    )


class DeltaArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("rates", c_void_p),
        ("rates_stride", c_int64),
        ("out", c_void_p),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("is_tiled", c_int64),
        ("decay_log", c_void_p),
        ("decay_bias", c_void_p),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("factors", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
    )


class ScanArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("steps", c_void_p),
        ("steps_stride", c_int64),
        ("out", c_void_p),
        ("heads", c_int64),
        ("groups", c_int64),
        ("head_dim", c_int64),
        ("state_dim", c_int64),
        ("decay_log", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("norm_weight", c_void_p),
        ("norm_is_first", c_int64),
        ("eps", c_float),
        ("factors", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
    )


class SelectiveArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("steps", c_void_p),
        ("steps_stride", c_int64),
        ("shared", c_void_p),
        ("shared_stride", c_int64),
        ("out", c_void_p),
        ("channels", c_int64),
        ("state_dim", c_int64),
        ("decay_log", c_void_p),
        ("skip", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
    )


class LightningArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("out", c_void_p),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("decay", c_void_p),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("states", c_void_p),
        ("state_stride", c_int64),
    )


class AddPositionsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("table", c_void_p),
    )


class CrossArgs(ctypes.Structure):
    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
        ("kept", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("num_positions", c_int64),
        ("padded", c_int64),
        ("scale", c_float),
    )


class WriteEncodedArgs(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("num_positions", c_int64),
        ("padded", c_int64),
    )


class CutOffArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("deviations", c_float),
        ("activation", c_int64),
    )


class OpenStreamsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num", c_int64),
        ("size", c_int64),
    )


class PredictStreamsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("factors", c_void_p),
        ("factors_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num", c_int64),
        ("size", c_int64),
    )


class CorrectStreamsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("factors", c_void_p),
        ("factors_stride", c_int64),
        ("num", c_int64),
        ("size", c_int64),
        ("active", c_int64),
    )


class CloseStreamsArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num", c_int64),
        ("size", c_int64),
    )


class LayerNormWeights(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
    )


class LayerNormArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("size", c_int64),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("norm", LayerNormWeights),
    )


class LimitArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("size", c_int64),
        ("limits", c_void_p),
        ("activation", c_int64),
    )


class EmbedSumArgs(ctypes.Structure):
    _fields_ = (
        ("words", c_void_p),
        ("kinds", c_void_p),
        ("positions", c_void_p),
        ("is_bf16", c_int64),
        ("kind_ids", c_void_p),
        ("first_position", c_int64),
        ("size", c_int64),
        ("norm", LayerNormWeights),
        ("out", c_void_p),
    )


RankCall = ctypes.CFUNCTYPE(
    c_int64,
    c_int64,
    c_void_p,
    c_int64,
    c_void_p,
)


class RanksArgs(ctypes.Structure):
    _fields_ = (
        ("rank", c_int64),
        ("size", c_int64),
        ("shared", c_void_p),
        ("chunk", c_int64),
        ("meetings", c_void_p),
        ("timeout_ns", c_int64),
        ("call", RankCall),
    )


class SumRanksArgs(ctypes.Structure):
    _fields_ = (
        ("ranks", c_void_p),
        ("x", c_void_p),
        ("columns", c_int64),
        ("add", c_void_p),
        ("add_stride", c_int64),
        ("scale", c_float),
    )


class GatherRanksArgs(ctypes.Structure):
    _fields_ = (
        ("ranks", c_void_p),
        ("x", c_void_p),
        ("columns", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("out_columns", c_int64),
    )


class ScaleLogitsArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("scale", c_float),
        ("cap", c_float),
    )


class ArgmaxArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("tokens", c_void_p),
        ("max_logits", c_void_p),
    )


class ScreenedHeadArgs(ctypes.Structure):
    _fields_ = (
        ("exact", c_void_p),
        ("quick", c_void_p),
        ("argmax", c_void_p),
        ("errors", c_void_p),
        ("sizes", c_void_p),
    )


class CopyHeadArgs(ctypes.Structure):
    _fields_ = (
        ("exact", c_void_p),
        ("copy", c_void_p),
        ("errors", c_void_p),
        ("sizes", c_void_p),
    )


class MaskArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("num_masks", c_int64),
        ("masks", c_void_p),
        ("mask_stride", c_int64),
        ("rows", c_void_p),
    )


class PenaliseArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("rows", c_void_p),
        ("frequency", c_void_p),
        ("presence", c_void_p),
        ("repetition", c_void_p),
        ("history", c_void_p),
        ("offsets", c_void_p),
        ("output_starts", c_void_p),
        ("lacks_last", c_void_p),
        ("last_tokens", c_void_p),
    )


class DrawArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("max_logits", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("tokens", c_void_p),
    )


class SpreadArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("ids", c_void_p),
        ("num", c_int64),
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("stride", c_int64),
    )


class LogprobsArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("rows", c_void_p),
        ("max_logits", c_void_p),
        ("tokens", c_void_p),
        ("num_top", c_int64),
        ("logprobs", c_void_p),
        ("top_tokens", c_void_p),
        ("top_logprobs", c_void_p),
    )


KIND_OF: dict[type[ctypes.Structure], OpKind] = {
    EmbedArgs: OpKind.EMBED,
    NormArgs: OpKind.NORM,
    LinearArgs: OpKind.LINEAR,
    RotaryStoreArgs: OpKind.ROTARY_STORE,
    AttentionArgs: OpKind.ATTENTION,
    ArgmaxArgs: OpKind.ARGMAX,
    MaskArgs: OpKind.MASK,
    DrawArgs: OpKind.DRAW,
    LogprobsArgs: OpKind.LOGPROBS,
    PenaliseArgs: OpKind.PENALISE,
    EmbedSumArgs: OpKind.EMBED_SUM,
    LayerNormArgs: OpKind.LAYER_NORM,
    ScaleLogitsArgs: OpKind.SCALE_LOGITS,
    RouteArgs: OpKind.ROUTE,
    ExpertsArgs: OpKind.EXPERTS,
    GateRowsArgs: OpKind.GATE_ROWS,
    ConvArgs: OpKind.CONV,
    DeltaArgs: OpKind.DELTA,
    ScanArgs: OpKind.SCAN,
    AddVectorsArgs: OpKind.ADD_VECTORS,
    SumRanksArgs: OpKind.SUM_RANKS,
    GatherRanksArgs: OpKind.GATHER_RANKS,
    CopyArgs: OpKind.COPY,
    MultiplyArgs: OpKind.MULTIPLY,
    NarrowArgs: OpKind.NARROW,
    ScreenedHeadArgs: OpKind.SCREENED_HEAD,
    CopyHeadArgs: OpKind.COPY_HEAD,
    AddPositionsArgs: OpKind.ADD_POSITIONS,
    CrossArgs: OpKind.CROSS,
    KeepRowsArgs: OpKind.KEEP_ROWS,
    TakeRowsArgs: OpKind.TAKE_ROWS,
    SpreadArgs: OpKind.SPREAD,
    SelectiveArgs: OpKind.SELECTIVE,
    LightningArgs: OpKind.LIGHTNING,
    LimitArgs: OpKind.LIMIT,
    CutOffArgs: OpKind.CUT_OFF,
    OpenStreamsArgs: OpKind.OPEN_STREAMS,
    PredictStreamsArgs: OpKind.PREDICT_STREAMS,
    CorrectStreamsArgs: OpKind.CORRECT_STREAMS,
    CloseStreamsArgs: OpKind.CLOSE_STREAMS,
    IndexedArgs: OpKind.INDEXED,
    WriteEncodedArgs: OpKind.WRITE_ENCODED,
}
