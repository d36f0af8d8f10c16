#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

static void argmax(const ArgmaxArgs& args, const Step& step, Team& team) {}
static void mask(const MaskArgs& args, const Step& step, Team& team) {}
static void draw(const DrawArgs& args, const Step& step, Team& team) {}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
