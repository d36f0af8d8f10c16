#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

static void linear(const LinearArgs& args, const Step& step, Team& team) {}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
