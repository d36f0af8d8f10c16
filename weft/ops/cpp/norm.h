#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

static void norm(const NormArgs& args, const Step& step, Team& team) {}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
