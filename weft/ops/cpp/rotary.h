#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

static void rotary_store(const RotaryStoreArgs& args, const Step& step, Team& team) {}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
