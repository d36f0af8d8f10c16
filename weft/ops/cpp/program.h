// What crosses from Python to the kernels: a program is an array of operations, and a step says
// what they run on. All plain C structures and numbers; `generate_abi.py` makes `abi.py` from this
// file, which has them for Python. Operation kLinear has the structure LinearArgs, and so on.
//
// A program is recorded once and runs at every step: one call, one team of threads, a barrier after
// each operation. Matrices are row-major float32 [rows, columns], unless said otherwise; strides
// count elements.
#pragma once

#include <cstdint>

namespace weft {

// Neighbours in `StepArgs.lora_rows` that have one adapter, at most kLoraRows.
struct LoraBlock {
  int32_t adapter;
  int32_t first;
  int32_t num_rows;
};

constexpr int kLoraRows = 12;

// One step: T tokens of R requests. Request r has lens[r] tokens, which stand after those of the
// requests before it; the first of them has starts[r] tokens of its sequence before it, which are
// in the cache. T = sum of lens.
struct StepArgs {
  int64_t num_tokens;
  int64_t num_requests;
  const int64_t* tokens;     // [T] ids
  const int64_t* positions;  // [T]
  const int64_t* slots;      // [T] where K and V of each token go
  const int32_t* rows;       // [R] line of each request in `table`
  const int32_t* starts;     // [R]
  const int32_t* lens;       // [R]
  // [.., table_stride] slot of each token of a request; this step's are in it.
  const int32_t* table;
  int64_t table_stride;
  // [.., vectors_stride] what tokens below 0 stand for: token -1 - k for row k.
  const float* vectors;
  const int64_t* window_slots;  // [T] the same as `slots` for caches that are `windowed`
  const int32_t* window_table;  // [.., table_stride] the same as `table`
  // Slots of the layers that keep a state of fixed size for each request. No slot is written twice,
  // and none that a request writes is read by another.
  const int32_t* state_reads;   // [R] slot of the state before the request's tokens; -1: zeros
  const int32_t* state_writes;  // [R] slot of the state after them
  int64_t num_kept;             // K
  const int32_t* kept_rows;     // [K] which of the R requests leaves a copy of its state,
  const int32_t* kept_lens;     // [K] after how many of its tokens,
  const int32_t* kept_slots;    // [K] and where
  const int32_t* adapters;      // [T] the adapter of each token, -1: none; null: no token has one
  int64_t num_lora_blocks;
  const LoraBlock* lora_blocks;  // of all tokens that have one
  const int32_t* lora_rows;      // these tokens, those of an adapter side by side
  // [3, T] positions in time, height and width by which tokens are rotated; null: `positions`.
  const int32_t* rotation;
  int64_t vectors_stride;  // at least the `in` of the embedding; 0: that
  // [T] position after the last token that each one sees, rising in a request, at least its own and
  // at most its request's last of the step; null: each sees up to itself.
  const int32_t* sees_to;
  // Some of these tokens, with which a program goes on from its first kNarrow; null: all of them.
  const StepArgs* narrowed;
  // [T] of a narrowed step: which of all tokens each one is, rising; null: this is no such step.
  const int64_t* token_indices;
};

enum OpKind : int64_t {
  kPackWeight = 0,
  kUnpackWeight = 1,
  kEmbed = 2,
  kNorm = 3,
  kLinear = 4,
  kRotaryStore = 5,
  kAttention = 6,
  kArgmax = 7,
  kMask = 8,
  kDraw = 9,
  kLogprobs = 10,
  kPenalise = 11,
  kEmbedSum = 12,
  kLayerNorm = 13,
  kScaleLogits = 14,
  kRoute = 15,
  kExperts = 16,
  kGateRows = 17,
  kConv = 18,
  kDelta = 19,
  kScan = 20,
  kAddVectors = 21,
  kSumRanks = 22,
  kGatherRanks = 23,
  kCopy = 24,
  kMultiply = 25,
  kNarrow = 26,
  kScreenedHead = 27,
  kCopyHead = 28,
  kAddPositions = 29,
  kCross = 30,
  kKeepRows = 31,
  kTakeRows = 32,
  kSpread = 33,
  kSelective = 34,
  kLightning = 35,
  kLimit = 36,
  kCutOff = 37,
  kOpenStreams = 38,
  kPredictStreams = 39,
  kCorrectStreams = 40,
  kCloseStreams = 41,
  kIndexed = 42,
  kWriteEncoded = 43,
};

constexpr int kNumOps = kWriteEncoded + 1;

struct Op {
  int64_t kind;
  const void* args;  // the structure of that kind
};

// A fused step, one call from a plan to tokens: `body` runs over the tokens that the plan
// describes, `head` over what it leaves of the last token of each of the S requests that sample.
// Everything stays where it is from one step to the next, but for `numbers` and what `head` draws
// by.
struct FusedStep {
  int64_t num_tokens;
  int64_t num_requests;
  int64_t num_sampling;  // S
  // Rows [R], starts [R], lens [R], whether it samples [R], ids [T] (below 0: the token sampled
  // last for its row), slots [T]; with a window_table, its slots [T]; with states, reads [R],
  // writes [R], kept rows, lens and slots [K]; all concatenated.
  const int32_t* numbers;
  const Op* body;
  int64_t num_body;
  const Op* head;  // up to `chosen` and `max_logits`
  int64_t num_head;
  int32_t* table;  // [num_rows, table_stride] slot of each token of a row
  int64_t num_rows;
  int64_t table_stride;
  int64_t* last_tokens;  // [num_rows] the token sampled last
  int64_t* columns;      // scratch, [kFusedColumns, T]
  // What `body` writes, [T, hidden_size]; if it narrows its step, [S, hidden_size].
  const float* hidden;
  int64_t hidden_size;
  float* last;              // [S, hidden_size] what `head` reads
  const int64_t* chosen;    // [S]
  const float* max_logits;  // [S] the largest logit of each
  int32_t* tokens;          // [S] result: what is chosen; 0 where the logits are not finite
  uint8_t* invalid;         // [S] result: 1 where they are not
  int64_t num_invalid;      // result
  // [num_rows, table_stride] of the layers with windows, or null: `table` is that of all layers.
  int32_t* window_table;
  int64_t num_state_slots;  // 0: no layer keeps a state
  int64_t num_kept;         // K
  const int32_t* adapters;  // as in StepArgs, and so on
  int64_t num_lora_blocks;
  const LoraBlock* lora_blocks;
  const int32_t* lora_rows;
  const int32_t* rotation;       // [3, T] as in StepArgs, or null
  const int32_t* head_adapters;  // [S] as in StepArgs, of what `head` reads, and so on
  int64_t head_num_lora_blocks;
  const LoraBlock* head_lora_blocks;
  const int32_t* head_lora_rows;
  // 1: `body` computes all tokens in all layers, although it could narrow its step.
  int64_t computes_all;
};

// Of a token in `FusedStep.columns`: its id, position and slots; then, if the step is narrowed, the
// id, position and index of each sampled token, and the row, start, len and three positions of
// rotation, all of 4 bytes.
constexpr int kFusedColumns = 4 + 3 + 3;

// How tokens are drawn, as in DrawArgs.
struct DrawColumns {
  float* temperature;
  int32_t* top_k;
  float* top_p;
  float* min_p;
  int64_t* seeds;
  int32_t* positions;
};

// A chain of fused steps in which a draft model guesses: the first one computes what
// `FusedStep.numbers` says, each of the others the token that the one before has drawn. G = sum of
// counts; the tokens of a request stand side by side.
struct Guesses {
  // [R] tokens to draw for each request; 0: the first step computes its tokens, and draws none.
  const int32_t* counts;
  // [G - requests that draw] where K and V of each drawn token go, but for the last of a request.
  const int32_t* slots;
  // [G] how each is drawn; null: the head draws nothing, it takes the likeliest.
  const DrawColumns* all;
  const DrawColumns* step;  // [R] where the head reads how to draw
  int32_t* numbers;         // scratch, [6, R]
  int32_t* tokens;          // [G] result; 0 where the logits are not finite
  // What the steps after the first one run, and what that writes, [R, hidden_size]; null: the same
  // `body`.
  const Op* later;
  int64_t num_later;
  const float* later_hidden;
  // [rows, hidden_size] what each step leaves of the last token of each request that draws, for the
  // next one; or null.
  float* carried;
};

// ---------------------------------------------------------------- weights

// How the elements of a weight [out, in] are kept. All formats consist of panels of kPanel outputs:
// panel p holds outputs p kPanel and after, of all inputs. The last panel is filled up with zeros,
// and so are the inputs up to a multiple of kInStep: `in_size` is the number without, `padded_in`
// with them.
//
// A gated weight consists of a gate and an up part of n outputs each, n = out / 2. Each part is
// filled up to whole panels by itself, and their panels alternate: there are 2 ceil(n / kPanel)
// panels, panel 2 j holds the gates and panel 2 j + 1 the ups of units j kPanel and after. Any
// other weight has ceil(out / kPanel). "Padded out" is kPanel times that.
//
//   kF32   [panel][in][kPanel] float
//   kBf16  [panel][in / 2][kPanel][2]: neighbouring inputs are together, as dot_pairs wants them
//   kI8    [panel] a head, then [in / 4][kPanel][4] codes 0..255
//   kI4    [panel] a head, then [in / 8][kPanel][4] bytes: inputs 8 i .. 8 i + 3 in the low half,
//          8 i + 4 .. 8 i + 7 in the high half, codes 0..15 or indices in a table of codes
//   kI6    [panel] a head, then [in / 16][3][kPanel][4] bytes, codes 0..63: their lower four bits
//          as in kI4, in two rows of 8 inputs; then a byte for inputs i, i + 4, i + 8, i + 12 with
//          the upper two of each
//   kI2    [panel] a head, then [in / 16][kPanel][4] bytes: inputs i, i + 4, i + 8, i + 12 from the
//          lowest two bits upwards, codes 0..3
//   kI3    [panel] a head, then [in / 32][3][kPanel][4] bytes, codes 0..7 or indices in a table:
//          their lower two bits as in kI2, in two rows of 16 inputs; then a byte with the upper
//          bits of inputs i, i + 4, .. i + 28
//   kI16   [panel] a head of scales, [in / kShortGroup][kPanel] float, then [in / 2][kPanel][2]
//          shorts: w = scale * short
//
// With codes, w = scale * (code - offset) + min, with a scale (and maybe a min) for each output and
// group of inputs. These stand in the head of the panel, which is filled up to a multiple of 64
// bytes, m = 2 with mins, else 1:
//
//   kScaleF32, F16, Bf16   [groups][m][kPanel]
//   kScaleCoarse           [in / kCoarse][m][kPanel] half floats, then [groups][m][kPanel] signed
//                          bytes: their product, times `unit`
enum WeightFormat : int64_t {
  kF32 = 0,
  kBf16 = 1,
  kI8 = 2,
  kI4 = 3,
  kI16 = 4,
  kI6 = 5,
  kI2 = 6,
  kI3 = 7,
};
enum ScaleType : int64_t { kScaleF32 = 0, kScaleF16 = 1, kScaleBf16 = 2, kScaleCoarse = 3 };

constexpr int kPanel = 32;   // outputs of a panel
constexpr int kInStep = 64;  // inputs are padded to a multiple of this
// Inputs of a slab of activations (gemm.h), ranks of a slab of A x (lora.h).
constexpr int kSlab = 64;
constexpr int kCoarse = 256;      // inputs that share a coarse factor
constexpr int kShortGroup = 256;  // inputs that share a scale of kI16, of outputs and of rows

struct PackedWeight {
  int64_t format;
  int64_t in_size;
  int64_t out_size;
  int64_t padded_in;
  int64_t group;  // inputs that share a scale: 16, a multiple of 32, or padded_in
  int64_t scale_type;
  int64_t has_mins;
  int64_t offset;
  int64_t has_table;  // kI4 and kI3
  uint8_t table[16];
  float unit;  // a power of two; of kScaleCoarse
  void* panels;
  // [in] which input of x each input of the panels is; null: they stand as in x.
  const int32_t* order;
};

enum ContentType : int64_t { kContentFloat = 0, kContentBf16 = 1, kContentCodes = 2 };

// Rows of a plain matrix into (or out of) a weight: as floats, quantised as its format says; or as
// the codes that it keeps, with their scales. All of the weight's memory is zero before the first
// rows come. Row 0 goes to output first_row, the next ones after it; if `interleave` is 2, every
// other panel is left out: gate u of a gated weight is output u / kPanel * 2 kPanel + u % kPanel,
// its up kPanel more.
struct PackArgs {
  const PackedWeight* weight;
  // [num_rows, in] float, bf16 or bytes, read by kPackWeight, written (as float) by kUnpackWeight.
  void* matrix;
  int64_t content;
  int64_t num_rows;
  int64_t first_row;
  int64_t interleave;  // 1 or 2
  // Of codes: [num_rows, in / group], of the weight's type; signed bytes with coarse ones.
  const void* scales;
  const void* mins;    // the same, or null
  const void* coarse;  // [num_rows, in / kCoarse] half floats, or null
  const void* coarse_mins;
};

// What one adapter adds to the rows of a table: to row t of it, B a[t]. Its scale is in B.
struct LoraRows {
  int64_t rank;    // 0: nothing is added
  const void* a;   // [rows of the table, rank] float or bf16
  const float* b;  // [rank, in]
  const float* gain;  // [in] of the row of the table; null: 1
};

struct LoraTable {
  int64_t is_bf16;
  const LoraRows* adapters;  // by adapter slot
};

// out[t] = row tokens[t] of the weight, as float, times scale; a vector of the step, as it is,
// where tokens[t] is below 0. Reads StepArgs.tokens. Of a table that ranks have in parts, this has
// the rows of tokens first .. first + num_rows - 1: others become zeros here, and vectors do but on
// the rank that has token 0.
struct EmbedArgs {
  const PackedWeight* weight;
  float* out;   // [T, in]
  float scale;  // 0 is the same as 1
  int64_t first;
  int64_t num_rows;       // 0: the table is whole
  const LoraTable* lora;  // or null: no adapter changes this weight
  int64_t unknown_token;  // not 0: tokens below 0 get the row of token unknown_token - 1, no vector
};

// x[t] += numbers part size .. (part + 1) size - 1 of a vector of the step, where
// StepArgs.tokens[t] is below 0; nothing if vectors are shorter.
struct AddVectorsArgs {
  float* x;  // [T, x_stride]
  int64_t x_stride;
  int64_t size;
  int64_t part;
};

// num pieces of each row, of `size` numbers: piece i of row t stands at t x_stride + i x_step, and
// goes to t out_stride + i out_step.
struct CopyArgs {
  const float* x;
  int64_t x_stride;
  int64_t x_step;
  float* out;
  int64_t out_stride;
  int64_t out_step;
  int64_t num;
  int64_t size;
};

// kept[StepArgs.slots[t]] = x[t], in bf16.
struct KeepRowsArgs {
  const float* x;  // [T, x_stride]
  int64_t x_stride;
  int64_t size;
  void* kept;  // [slots, kept_stride] bf16
  int64_t kept_stride;
};

// out[t] = kept[StepArgs.slots[t]]. Or, if `carried` is not null, carried[StepArgs.rows[t]] in a
// step with one token for each request.
struct TakeRowsArgs {
  const void* kept;  // [slots, kept_stride] bf16
  int64_t kept_stride;
  const float* carried;  // [rows, size]
  int64_t size;
  float* out;  // [T, out_stride]
  int64_t out_stride;
};

// x[t] = x[StepArgs.token_indices[t]], in place: the rows of the tokens with which a step goes on.
// Does nothing in a step that is not narrowed.
struct NarrowArgs {
  float* x;  // [T, x_stride]
  int64_t x_stride;
  int64_t size;
};

// x[t, i] *= by[t by_stride + i by_step]; by_step is 1, or 0: all numbers of a row have one factor.
struct MultiplyArgs {
  float* x;
  int64_t x_stride;
  const float* by;
  int64_t by_stride;
  int64_t by_step;
  int64_t size;
};

// out = x / rms(x) * weight, over rows of `size`; out may be x. Or out += add_scale times that, if
// add_scale is not 0.
struct NormArgs {
  const float* x;
  const float* weight;
  float* out;
  int64_t size;
  int64_t x_stride;
  int64_t out_stride;
  float eps;
  float add_scale;
};

enum Epilogue : int64_t {
  kStore = 0,      // y = W x + bias
  kAdd = 1,        // y += W x + bias
  kGatedSilu = 2,  // y = silu(gate) * up, for a gated weight; y has out / 2 columns
  kGelu = 3,       // y = f(W x + bias)
  kGeluTanh = 4,
  kRelu = 5,
  kTanh = 6,
  kRelu2 = 7,          // relu(x)^2
  kGatedGeluTanh = 8,  // as kGatedSilu, with another activation of the gate
  kAddScaled = 9,      // y += scale (W x + bias)
  // Of experts only: (up + 1) gate sigmoid(kClampedAlpha gate), of values up to kClamp.
  kGatedClamped = 10,
  kQuickGelu = 11,  // x sigmoid(kQuickGeluSlope x)
  kGatedGelu = 12,  // as kGatedSilu, with another activation of the gate
};

constexpr float kClamp = 7.0f;
constexpr float kClampedAlpha = 1.702f;
constexpr float kQuickGeluSlope = 1.702f;

constexpr int kLoraTile = 16;  // ranks are padded to a multiple of this

// What one adapter makes of the product W x of a part of a weight:
// gain W x + scale B (A x) + shift.
struct PackedLoraPart {
  int64_t rank;  // with what fills it up; 0: nothing is added
  // [rank / kLoraTile][padded_in][kLoraTile] float, or [..][padded_in / 2][kLoraTile][2] bf16.
  const void* a;
  // [num_panels][rank][kPanel] float, or [..][rank / 2][kPanel][2] bf16; zeros for outputs of
  // others.
  const void* b;
  const float* gain;   // [num_panels][kPanel], 1 for outputs of others; null: 1
  const float* shift;  // [num_panels][kPanel], 0 for outputs of others; null: 0
  float scale;
};

// The panels of a weight that have outputs of a part: num_panels of them, each `step` after the one
// before.
struct LoraRange {
  int64_t first_panel;
  int64_t num_panels;
  int64_t step;
};

// What adapters add to a weight. Its parts are the matrices that adapters change each by itself.
struct Lora {
  int64_t num_parts;
  const LoraRange* ranges;      // [num_parts]
  const PackedLoraPart* parts;  // [adapters, num_parts]
  int64_t is_bf16;
  int64_t max_rank;  // of a part
};

// y = epilogue(W norm(x) + bias) for the num_tokens rows of x. Exactly `out` columns of y (gated:
// out / 2) are written, for kAdd and kAddScaled also read; y must not overlap x. kI8, kI6 and kI4
// take x (after the norm) in 8 bits, the largest of each 32 at 127; kI16 in 13 bits, the largest of
// each kShortGroup at 4095.
struct LinearArgs {
  const PackedWeight* weight;
  const float* x;
  int64_t x_stride;
  const float* norm_weight;  // [in], or null: no norm
  float eps;
  const float* bias;  // [padded out], panels in the weight's order, or null
  int64_t epilogue;
  float* y;
  int64_t y_stride;
  // max_tokens * (4 padded_in + 64) bytes, shared by all threads, 64-byte aligned; with adapters,
  // 256 for each token, part and 64 ranks more.
  void* scratch;
  float scale;        // kAddScaled
  const Lora* lora;   // or null: no adapter changes this weight
  int64_t may_round;  // 1: x may be rounded to bf16, if the weight is kBf16 and that is faster
};

// ---------------------------------------------------------------- experts

enum ExpertScores : int64_t { kScoresSoftmax = 0, kScoresChosen = 1, kScoresSigmoid = 2 };

constexpr int64_t kMaxExperts = 1024;

// The experts of each token, as ops/routing.py says, and the order in which their rows are
// computed: sorted by expert, and by token within an expert. The row of a token's expert has an
// index in this order: its sorted row.
struct RouteArgs {
  const float* logits;  // [T, logits_stride]
  int64_t logits_stride;
  int64_t num_experts;  // E
  int64_t num_chosen;   // k
  int64_t scores;
  int64_t is_normed;
  float scale;
  const float* choice_bias;   // [E] or null
  const float* expert_scale;  // [E] a factor of each expert's weights, or null
  int64_t num_groups;
  int64_t num_groups_chosen;
  int64_t counts_one;    // 1: a group counts as much as its best expert; 0: as its best two
  int32_t* experts;      // [T, k]
  float* weights;        // [T, k]
  int32_t* offsets;      // [E + 1] sorted row of the first row of each expert
  int32_t* tokens;       // [T k] of each sorted row
  int32_t* sorted_rows;  // [T, k]
};

// y = scale sum over j of weights[t, j] (down inner + bias), or y += that if `adds`; the sum is
// taken from the best expert on. inner = activation(gate x + bias) * (up x + bias), or, by the
// activation, of ups alone: activation(up x + bias). The weights are
// those of the first expert; panels of the others follow its panels.
struct ExpertsArgs {
  const PackedWeight* gate_up;  // gated
  const PackedWeight* down;
  const float* gate_up_bias;  // [E, padded out] or null, in the order of the panels
  const float* down_bias;
  int64_t activation;  // an epilogue
  int64_t num_experts;
  int64_t num_chosen;
  const float* x;  // [T, x_stride]
  int64_t x_stride;
  const int32_t* experts;  // as RouteArgs left them
  const float* weights;
  const int32_t* offsets;
  const int32_t* tokens;
  const int32_t* sorted_rows;
  float* inner;  // [T k, out / 2 of gate_up; without gates, out]
  float* y;
  int64_t y_stride;
  float scale;
  int64_t adds;
  // max_tokens * k * (4 padded_in + 64) bytes, for the larger padded_in of both; 64-byte aligned.
  void* scratch;
  // [adapters, 2 E] what adapters add to gate and up of each expert; or null.
  const PackedLoraPart* lora_gate_up;
  const PackedLoraPart* lora_down;  // [adapters, E]
  int64_t lora_is_bf16;
  int64_t lora_rank;  // the highest, a multiple of 64
  float* lora_inner;  // [T k, 2, lora_rank]
};

// Each row of y becomes sigmoid(weight x) times itself; without a weight, x times itself, where
// in_size is 1.
struct GateRowsArgs {
  const float* x;
  int64_t x_stride;
  const float* weight;  // [in] or null
  int64_t in_size;
  float* y;
  int64_t y_stride;
  int64_t columns;
};

// ---------------------------------------------------------------- attention

enum KvFormat : int64_t { kKvF32 = 0, kKvBf16 = 1, kKvI8 = 2, kKvI16 = 3 };

// K and V of one layer: [slots, kv_heads, head_dim]; kKvI8 and kKvI16 with a scale for each slot
// and head (the latter for at most 256 dims). Where `v` is `k`, keys are values, too, and are
// stored once.
struct KvCache {
  int64_t format;
  int64_t kv_heads;
  int64_t head_dim;
  void* k;
  void* v;
  float* k_scale;  // [slots, kv_heads]
  float* v_scale;
  int64_t stride;    // elements from one slot to the next; 0: nothing is between them
  int64_t windowed;  // 1: its slots are those of StepArgs.window_slots and StepArgs.window_table
};

// Each row of qkv has the heads of q, q_head_stride from one to the next, then those of k and of v,
// [kv_heads, head_dim]. Normalise the heads of q and k (if there are weights for it), rotate them,
// write q back (times its position's q_scale) and k and v to the cache at StepArgs.slots. A cache
// without heads stores nothing; one whose keys are its values has none of v in a row, nor has a row
// of `values_are_keys`, whose values are the keys before their norm and rotation.
struct RotaryStoreArgs {
  const KvCache* cache;
  float* qkv;  // [T, qkv_stride]
  int64_t qkv_stride;
  int64_t heads;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float eps;
  int64_t rotary_dim;  // the first rotary_dim of head_dim are rotated
  const float* cos;    // [positions, rotary_dim / 2]
  const float* sin;
  int64_t side_by_side;   // 1: pairs are (2 i, 2 i + 1); 0: (i, i + rotary_dim / 2)
  const float* q_scale;   // [positions], or null
  int64_t q_head_stride;  // 0: head_dim
  // [rotary_dim / 2] which line of StepArgs.rotation each pair turns by; or null: tokens have one
  // position.
  const uint8_t* axes;
  float v_eps;  // not 0: heads of v become v / rms(v), with this eps
  int64_t values_are_keys;
};

// Attention of each token of the step to the cached tokens of its request and those of the step up
// to itself, or to all of its request (`bidirectional`). For an encoder, slots are positions in the
// step, and the cache is what its linear has written.
struct AttentionArgs {
  const KvCache* cache;
  const float* q;  // [T, q_stride], rows [heads, head_stride], of which the first head_dim count
  int64_t q_stride;
  float* out;  // [T, heads * head_dim]
  int64_t heads;
  int64_t window;  // tokens that a query sees, itself included; 0: all
  float scale;
  // 1: queries see what is after them, too; a window then reaches as far to both sides
  int64_t bidirectional;
  float cap;              // scores become cap tanh(score / cap); 0: they stay
  // [heads] a score of each that joins the sum of its softmax, and has no value; or null.
  const float* sinks;
  int64_t head_stride;  // of q and gate; 0: head_dim
  const float* gate;    // [T, q_stride] as q: out becomes out sigmoid(gate); or null
  // 1: queries, keys and values may be rounded to bf16, if that is faster; bidirectional alone.
  int64_t may_round;
  // 1: a query sees the keys from the last multiple of `window` on, instead of the last `window`.
  int64_t chunked;
  // What a head's scores get by the distance of the key from the query, or null: `biases` is that
  // of the first head at distance 0, `bias_stride` the floats from one head to the next. For all
  // keys of a full slab around those that a query sees, there must be floats.
  const float* biases;
  int64_t bias_stride;
  int64_t sees_no_later;  // 1: queries see up to themselves, whatever StepArgs.sees_to says
  int64_t most_keys;      // tokens that see more keys are left out, with their rows; 0: none
};

// Attention of the tokens that see more than `num_chosen` keys, to as many: those with the largest
// sums over the indexer's heads of weight max(q k, 0), of equal ones the first. Rows of other
// tokens stay as they are. Both caches have one head, floats or bf16; keys are values, too.
struct IndexedArgs {
  const KvCache* cache;
  const KvCache* index;  // keys of the indexer
  const float* q;        // [T, q_stride]: [heads, cache->head_dim]
  int64_t q_stride;
  const float* index_q;  // [T, q_stride]: [index_heads, index->head_dim]
  const float* weights;  // [T, q_stride]: [index_heads]
  float* out;            // [T, heads * cache->head_dim]
  int64_t heads;
  int64_t index_heads;
  int64_t num_chosen;
  float scale;
  int32_t* chosen;  // scratch [T, num_chosen]: slots
};

// ---------------------------------------------------------------- states

// A slot of a state is made of contiguous blocks of kStateLanes neighbours (state.h); the numbers
// of channels, of keys and of values of a head are multiples of it.
constexpr int kStateLanes = 16;

// y[t] = sum over j of weight[j] u[t - taps + 1 + j], + bias, of each channel by itself. u = x, or
// x in_gate; y becomes silu(y), or y out_gate. The state of a slot: [channels / kStateLanes][taps -
// 1][kStateLanes], the last u, the oldest first.
struct ConvArgs {
  const float* x;         // [T, x_stride]
  const float* in_gate;   // [T, x_stride] or null
  const float* out_gate;  // [T, x_stride] or null
  int64_t x_stride;
  float* y;  // [T, y_stride]; may be x
  int64_t y_stride;
  int64_t channels;
  int64_t taps;         // 2 to 4
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels] or null
  int64_t has_silu;
  float* states;  // [slots, state_stride]
  int64_t state_stride;
};

constexpr int kDeltaFactors = 8;  // floats of scratch for a token and value head
constexpr float kDeltaEps = 1e-6f;

// The gated delta rule. For each value head a state S [key_dim, value_dim], with k and q of its key
// head, which are divided by their lengths (and q by sqrt(key_dim)), rate b and decay a:
//   S <- a S;  S <- S + k b (v - S k);  out = norm(S q) silu(gate)
// b = sigmoid(first rate), a = exp(-exp(decay_log) softplus(second rate + decay_bias)). The state
// of a slot: [value_heads][value_dim / kStateLanes][key_dim][kStateLanes].
struct DeltaArgs {
  const float* qkv;  // [T, qkv_stride]: q and k [key_heads, key_dim], v [value_heads, value_dim]
  int64_t qkv_stride;
  const float* gate;  // [T, gate_stride]: [value_heads, value_dim]
  int64_t gate_stride;
  const float* rates;  // [T, rates_stride]: two numbers of each value head, [2, value_heads]
  int64_t rates_stride;
  float* out;  // [T, value_heads * value_dim]
  int64_t key_heads;
  int64_t value_heads;  // a multiple of key_heads
  int64_t key_dim;
  int64_t value_dim;
  // Value head h has key head h % key_heads; else heads of a key head stand together.
  int64_t is_tiled;
  const float* decay_log;    // [value_heads]
  const float* decay_bias;   // [value_heads]
  const float* norm_weight;  // [value_dim]
  float eps;
  float* factors;  // scratch [T, value_heads, kDeltaFactors]
  float* states;   // [slots, state_stride]
  int64_t state_stride;
};

constexpr int kScanFactors = 2;  // floats of scratch for a token and head

// Mamba 2. For each head a state S [state_dim, head_dim], with b and c of its group (the heads of a
// group stand together), a step d = softplus(step + step_bias) and a decay a = exp(-exp(decay_log)
// d):
//   S <- a S + b (d x);  y = S c + skip x;  out = norm(y silu(gate)), over all heads of a group;
// norm(y) silu(gate) if the norm is first; y silu(gate) without its weight.
// The state of a slot: [heads][head_dim / kStateLanes][state_dim][kStateLanes].
struct ScanArgs {
  const float* x;  // [T, x_stride]: x [heads, head_dim], b and c [groups, state_dim]
  int64_t x_stride;
  const float* gate;  // [T, gate_stride]: [heads, head_dim]
  int64_t gate_stride;
  const float* steps;  // [T, steps_stride]: [heads]
  int64_t steps_stride;
  float* out;  // [T, heads * head_dim]
  int64_t heads;
  int64_t groups;  // heads is a multiple of it
  int64_t head_dim;
  int64_t state_dim;
  const float* decay_log;    // [heads]
  const float* step_bias;    // [heads]
  const float* skip;         // [heads]
  const float* norm_weight;  // [heads * head_dim], or null
  int64_t norm_is_first;
  float eps;
  float* factors;  // scratch [T, heads, kScanFactors]
  float* states;   // [slots, state_stride]
  int64_t state_stride;
};

// Mamba 1. For each channel a state S [state_dim], with b and c of the token, a step d =
// softplus(step) and decays a = exp(-exp(decay_log) d):
//   S <- a S + b (d x);  out = (S c + skip x) silu(gate)
// The state of a slot: [channels / kStateLanes][state_dim][kStateLanes].
struct SelectiveArgs {
  const float* x;  // [T, x_stride]: [channels]
  int64_t x_stride;
  const float* gate;  // [T, gate_stride]: [channels]
  int64_t gate_stride;
  const float* steps;  // [T, steps_stride]: [channels]
  int64_t steps_stride;
  const float* shared;  // [T, shared_stride]: b and c [state_dim]
  int64_t shared_stride;
  float* out;  // [T, channels]
  int64_t channels;
  int64_t state_dim;       // a multiple of 4
  const float* decay_log;  // [state_dim, channels]
  const float* skip;       // [channels]
  float* states;           // [slots, state_stride]
  int64_t state_stride;
};

// Lightning attention. For each head a state S [head_dim, head_dim], with q, k and v after their
// silu:
//   S <- decay S + k v;  out = norm(S q) sigmoid(gate), over all heads
// The state of a slot: [heads][head_dim / kStateLanes][head_dim][kStateLanes].
struct LightningArgs {
  float* qkv;  // [T, qkv_stride]: q, k and v [heads, head_dim], before their silu; overwritten
  int64_t qkv_stride;
  const float* gate;  // [T, gate_stride]: [heads, head_dim]
  int64_t gate_stride;
  float* out;  // [T, heads * head_dim]
  int64_t heads;
  int64_t head_dim;
  const float* decay;        // [heads]
  const float* norm_weight;  // [heads * head_dim]
  float eps;
  float* states;  // [slots, state_stride]
  int64_t state_stride;
};

// ---------------------------------------------------------------- cross attention

// x[t] += table[positions[t]]. Reads StepArgs.positions.
struct AddPositionsArgs {
  float* x;  // [T, x_stride]
  int64_t x_stride;
  int64_t size;
  const float* table;  // [.., size]
};

// Attention of each token to all of num_positions vectors, the same for all tokens of a request:
// those in the slot with the number of its row. Reads StepArgs.rows and StepArgs.lens.
struct CrossArgs {
  const float* q;  // [T, q_stride]: [heads, head_dim]
  int64_t q_stride;
  float* out;           // [T, heads * head_dim]
  float* kept;          // [T, heads * head_dim] a copy of q for later, or null
  const float* keys;    // [slots][heads][head_dim][padded]
  const float* values;  // [slots][heads][padded][head_dim]
  int64_t heads;
  int64_t head_dim;
  int64_t num_positions;  // at most kMaxCross
  int64_t padded;         // num_positions, rounded up to a multiple of kCrossStep
  float scale;            // of scores
};

// Writes what cross attention of one layer reads for a request, from the rows of a product: zeros
// where padded.
struct WriteEncodedArgs {
  const float* rows;  // [num_positions, stride]: keys [heads, head_dim], then values
  int64_t stride;
  float* keys;    // [heads][head_dim][padded]
  float* values;  // [heads][padded][head_dim]
  int64_t heads;
  int64_t head_dim;
  int64_t num_positions;
  int64_t padded;
};

constexpr int64_t kMaxCross = 4096;
constexpr int64_t kCrossStep = 64;

// ---------------------------------------------------------------- streams

// x = f(max(0, x - mean - deviations deviation)), with the mean and the standard deviation of a row
// of `size`; f is an `Epilogue` of one number.
struct CutOffArgs {
  float* x;
  int64_t x_stride;
  int64_t size;
  float deviations;
  int64_t activation;
};

// Rows of `num` streams side by side, each of `size`: x, and num - 1 others, which get the root
// mean square of x.
struct OpenStreamsArgs {
  const float* x;
  int64_t x_stride;
  const float* y;  // [T, y_stride], rows [num - 1, size]
  int64_t y_stride;
  float* out;  // [T, out_stride], rows [num, size]
  int64_t out_stride;
  int64_t num;
  int64_t size;
};

// Stream i of `out` = stream i of x + sum over j of factors[i num + j] times stream j of x.
struct PredictStreamsArgs {
  const float* x;
  int64_t x_stride;
  const float* factors;  // [T, factors_stride], rows [num, num]
  int64_t factors_stride;
  float* out;
  int64_t out_stride;
  int64_t num;
  int64_t size;
};

// Stream i of x += (1 + factors[i]) (y - stream `active` of x).
struct CorrectStreamsArgs {
  float* x;
  int64_t x_stride;
  const float* y;  // [T, y_stride], rows [size]
  int64_t y_stride;
  const float* factors;  // [T, factors_stride], rows [num]
  int64_t factors_stride;
  int64_t num;
  int64_t size;
  int64_t active;
};

// out = the mean of x and of num - 1 others, each with the root mean square of x.
struct CloseStreamsArgs {
  const float* x;
  int64_t x_stride;
  const float* y;  // [T, y_stride], rows [num - 1, size]
  int64_t y_stride;
  float* out;
  int64_t out_stride;
  int64_t num;
  int64_t size;
};

// ---------------------------------------------------------------- encoders

// (x - mean) / sqrt(variance + eps) * weight + bias, over a row.
struct LayerNormWeights {
  const float* weight;
  const float* bias;
  float eps;
};

struct LayerNormArgs {
  const float* x;
  float* out;
  int64_t size;
  int64_t x_stride;
  int64_t out_stride;
  LayerNormWeights norm;
};

// out = f(x limited to limits[0] .. limits[1]); f is an `Epilogue` of one number, kStore: none.
struct LimitArgs {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  int64_t size;
  const float* limits;  // [2]
  int64_t activation;
};

// out[t] = norm(words[tokens[t]] + kinds[kind_ids[t]] + positions[positions[t] + first_position]).
// Tables are row-major [.., size], bf16 or float; those of kinds and positions may be null, and the
// norm's weights, if there is none. Reads StepArgs.tokens and StepArgs.positions.
struct EmbedSumArgs {
  const void* words;
  const void* kinds;
  const void* positions;
  int64_t is_bf16;
  const int64_t* kind_ids;  // [T] kinds of segments
  int64_t first_position;
  int64_t size;
  LayerNormWeights norm;
  float* out;  // [T, size]
};

// ---------------------------------------------------------------- ranks

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kRanksHeadBytes = 16384;  // of the memory that ranks share, before the buffers
constexpr int64_t kRanksLostAt = 8192;      // a byte of the head that is not 0 once a rank is lost

enum RankAction : int64_t { kCallSum = 0, kCallGather = 1 };

// Does with what the processes of a step have what `what`, a RankAction, says.
using RankCall = int64_t (*)(int64_t what, const float* data, int64_t num, float* out);

// The processes that compute a step together, as one of them sees them.
struct RanksArgs {
  int64_t rank;
  int64_t size;
  // Memory of all of them: a head, then [2, size, chunk] floats; null: `call` does what is done
  // together.
  void* shared;
  int64_t chunk;       // at least the columns of all that is summed and gathered
  int64_t* meetings;   // how often they have met, by this rank's count
  int64_t timeout_ns;  // of a meeting
  // kCallSum: data, and out which is data, become the sum over all ranks, [num]. kCallGather: out
  // [size, num] gets the data of all ranks on rank 0; null elsewhere. Returns 0, or 1 if a rank is
  // lost.
  RankCall call;
};

// x becomes its sum over all ranks; or add += scale times that, and what becomes of x has no
// meaning.
struct SumRanksArgs {
  const RanksArgs* ranks;
  float* x;  // [T, columns]
  int64_t columns;
  float* add;  // [T, add_stride] or null
  int64_t add_stride;
  float scale;
};

// On rank 0: out[t] = the x[t] of all ranks side by side, without what is beyond out_columns.
// Nothing on the others.
struct GatherRanksArgs {
  const RanksArgs* ranks;
  const float* x;  // [T, columns]
  int64_t columns;
  float* out;  // [T, out_stride]
  int64_t out_stride;
  int64_t out_columns;
};

// ---------------------------------------------------------------- sampling
//
// Rows of logits: [S, stride], S = num_tokens.

// logits = cap tanh(scale logits / cap), in place; cap 0: scale logits.
struct ScaleLogitsArgs {
  float* logits;
  int64_t vocab_size;
  int64_t stride;
  float scale;
  float cap;
};

// For each row its largest logit and the first token that has it. A NaN is larger than all.
struct ArgmaxArgs {
  const float* logits;
  int64_t vocab_size;
  int64_t stride;
  int64_t* tokens;    // [S]
  float* max_logits;  // [S]
};

// What `exact` and then `argmax` give, of which most logits need not be computed (screen.h):
// `exact.y` has no meaning after it.
struct ScreenedHeadArgs {
  const LinearArgs* exact;  // of floats, with kStore, without bias and adapters
  const LinearArgs* quick;  // the same, but with a copy of the weight in kI8
  const ArgmaxArgs* argmax;
  const float* errors;  // [padded out] the length of the difference of a row from its copy
  const float* sizes;   // [padded out] the length of a row, or of its copy if that is longer
};

// Make the copy that ScreenedHeadArgs wants, and its errors and sizes.
struct CopyHeadArgs {
  const PackedWeight* exact;  // kF32 or kBf16
  const PackedWeight* copy;   // kI8, with scales of kScaleBf16, without mins
  float* errors;
  float* sizes;
};

// Logits whose bit is 0 become -inf. Bit t of mask i is masks[i * mask_stride + t / 32] >> (t %
// 32); there are none for tokens from 32 * mask_stride on, which become -inf, too.
struct MaskArgs {
  float* logits;
  int64_t vocab_size;
  int64_t stride;
  int64_t num_masks;
  const int32_t* masks;
  int64_t mask_stride;
  const int64_t* rows;  // [num_masks] which row of the logits each mask is for
};

// Lower the logits of tokens that were seen before, as ops/sampling.py says. Here S counts requests
// with penalties.
struct PenaliseArgs {
  float* logits;
  int64_t vocab_size;
  int64_t stride;
  const int32_t* rows;           // [S] which row of the logits each is
  const float* frequency;        // [S]
  const float* presence;         // [S]
  const float* repetition;       // [S]
  const int32_t* history;        // tokens of all requests, concatenated
  const int32_t* offsets;        // [S + 1] where those of each begin
  const int32_t* output_starts;  // [S] where its output does
  const uint8_t* lacks_last;     // [S] 1: the last token of its row is after them
  const int64_t* last_tokens;    // one of every row of the logits
};

// Draw one token per row: softmax of (logits / temperature), cut by top-k, then top-p of what is
// left, then min-p, then the maximum of logit + Gumbel noise, which is a function of seed, position
// and token alone (ops/noise.py). Rows with temperature 0 or a peak that is not finite keep their
// token.
struct DrawArgs {
  const float* logits;
  int64_t vocab_size;
  int64_t stride;
  const float* max_logits;   // [S] the largest logit of each
  const float* temperature;  // [S]
  const int32_t* top_k;      // [S] 0: off
  const float* top_p;        // [S] 1: off
  const float* min_p;        // [S] 0: off
  const int64_t* seeds;      // [S]
  const int32_t* positions;  // [S]
  int64_t* tokens;           // [S]
};

// logits[s, ids[i]] = x[s, i], and -inf for all other tokens.
struct SpreadArgs {
  const float* x;  // [S, x_stride]
  int64_t x_stride;
  const int64_t* ids;  // [num] rising
  int64_t num;
  float* logits;
  int64_t vocab_size;
  int64_t stride;
};

// Natural logarithms of probabilities, for S of the rows: of the row's token, and of the num_top
// likeliest ones in falling order, the first of equal ones first.
struct LogprobsArgs {
  const float* logits;
  int64_t vocab_size;
  int64_t stride;
  const int64_t* rows;      // [S] rows of the logits
  const float* max_logits;  // the largest logit of every row
  const int64_t* tokens;    // one of every row
  int64_t num_top;          // at most vocab_size
  float* logprobs;          // [S]
  int32_t* top_tokens;      // [S, num_top]
  float* top_logprobs;      // [S, num_top]
};

}  // namespace weft
