#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

static void attention(const AttentionArgs& args, const Step& step, Team& team) {}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
