#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

static void pack_weight(const PackArgs& args, const Step& step, Team& team) {}
static void unpack_weight(const PackArgs& args, const Step& step, Team& team) {}
static void embed(const EmbedArgs& args, const Step& step, Team& team) {}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
