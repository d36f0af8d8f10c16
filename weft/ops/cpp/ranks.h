// Processes that compute one step together, called ranks: where they meet within a program.
#pragma once

#include "program.h"

namespace weft {

// Floats that this rank shows to the others when it meets them next: [chunk]. Two such buffers
// alternate: a rank writes to one again only when all others have come to the meeting after it, and
// so have read it.
float* shown_next(const RanksArgs& ranks);

// What a rank has shown at the last meeting.
const float* shown_by(const RanksArgs& ranks, int64_t rank);

// Wait until all ranks have come. What they wrote before is seen by all after. False if a rank does
// not come; then, and ever after, nothing that is computed means anything, and the run that this
// belongs to says so.
bool meet(const RanksArgs& ranks);

// By the function of `ranks` that is outside of this library, where there is no memory to share.
bool call(const RanksArgs& ranks, RankAction what, const float* data, int64_t num, float* out);

// Whether a rank was lost since the last call of this.
bool take_lost();

}  // namespace weft
