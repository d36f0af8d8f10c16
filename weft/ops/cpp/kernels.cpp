// All kernels of one instruction set. Compiled once for each, with WEFT_NAMESPACE as its name and
// the macros of simd.h.
//
// Nothing here may be a template or inline function of the standard library: the linker keeps one
// copy of such a function for all instruction sets, and that copy may use instructions that the
// processor at hand lacks.

#include <cmath>

#include "program.h"
#include "team.h"

#include "simd.h"

#include "weights.h"
#include "norm.h"
#include "encoder.h"
#include "linear.h"
#include "moe.h"
#include "state.h"
#include "streams.h"
#include "rotary.h"
#include "attention.h"
#include "indexed.h"
#include "cross.h"
#include "sampling.h"
#include "screen.h"
#include "penalties.h"
#include "draw.h"
#include "logprobs.h"
#include "collective.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace weft {

using Kernel = void (*)(const void* args, const StepArgs& step, Team& team);

template <class Args, void (*function)(const Args&, const StepArgs&, Team&)>
static void call(const void* args, const StepArgs& step, Team& team) {
  function(*static_cast<const Args*>(args), step, team);
}

#define KERNEL(function, Args) call<Args, WEFT_NAMESPACE::function>

extern const Kernel JOIN(kernels_, WEFT_NAMESPACE)[kNumOps];
const Kernel JOIN(kernels_, WEFT_NAMESPACE)[kNumOps] = {
    KERNEL(pack_weight, PackArgs),
    KERNEL(unpack_weight, PackArgs),
    KERNEL(embed, EmbedArgs),
    KERNEL(norm, NormArgs),
    KERNEL(linear, LinearArgs),
    KERNEL(rotary_store, RotaryStoreArgs),
    KERNEL(attention, AttentionArgs),
    KERNEL(argmax, ArgmaxArgs),
    KERNEL(mask, MaskArgs),
    KERNEL(draw, DrawArgs),
    KERNEL(logprobs, LogprobsArgs),
    KERNEL(penalise, PenaliseArgs),
    KERNEL(embed_sum, EmbedSumArgs),
    KERNEL(layer_norm, LayerNormArgs),
    KERNEL(scale_logits, ScaleLogitsArgs),
    KERNEL(route, RouteArgs),
    KERNEL(experts, ExpertsArgs),
    KERNEL(gate_rows, GateRowsArgs),
    KERNEL(conv, ConvArgs),
    KERNEL(delta, DeltaArgs),
    KERNEL(scan, ScanArgs),
    KERNEL(add_vectors, AddVectorsArgs),
    KERNEL(sum_ranks, SumRanksArgs),
    KERNEL(gather_ranks, GatherRanksArgs),
    KERNEL(copy, CopyArgs),
    KERNEL(multiply, MultiplyArgs),
    KERNEL(narrow, NarrowArgs),
    KERNEL(screened_head, ScreenedHeadArgs),
    KERNEL(copy_head, CopyHeadArgs),
    KERNEL(add_positions, AddPositionsArgs),
    KERNEL(cross, CrossArgs),
    KERNEL(keep_rows, KeepRowsArgs),
    KERNEL(take_rows, TakeRowsArgs),
    KERNEL(spread, SpreadArgs),
    KERNEL(selective, SelectiveArgs),
    KERNEL(lightning, LightningArgs),
    KERNEL(limit, LimitArgs),
    KERNEL(cut_off, CutOffArgs),
    KERNEL(open_streams, OpenStreamsArgs),
    KERNEL(predict_streams, PredictStreamsArgs),
    KERNEL(correct_streams, CorrectStreamsArgs),
    KERNEL(close_streams, CloseStreamsArgs),
    KERNEL(indexed, IndexedArgs),
    KERNEL(write_encoded, WriteEncodedArgs),
};

}  // namespace weft
